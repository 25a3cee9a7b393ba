"""Which of a few languages a text is in, by its most frequent words."""

import re
from collections.abc import Mapping

# Articles, prepositions, pronouns and conjunctions. Some are words of several languages.
_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(words.split())
    for language, words in {
        "English": """
            the of and to a in is that it for on are as with be this by or at from not have an which
            you they their its can we was has but more when what
        """,
        "French": """
            a le la les de des du et à en est un une que qui dans pour sur pas au aux ce cette il
            elle ils elles nous vous sont par plus avec se ne son sa ses ou mais être leur l d c qu
        """,
        "German": """
            der die das und ist ein eine einen einem einer in zu den dem des von mit sich auf für im
            nicht es auch als an werden aus er sie wir oder aber nach bei wie sind durch wird
        """,
        "Italian": """
            a il lo la i gli le di e è un una che in per con non del della dei delle al alla da dal
            nel nella si sono come più ma anche o questo questa suo sua loro su ci l d dell
        """,
        "Spanish": """
            a el la los las de y en es un una que por con para no se del al lo como más pero su sus
            o este esta son le ha muy también hay cuando entre sin sobre ser desde todo
        """,
    }.items()
}
LANGUAGES = frozenset(_WORDS)


def language_of(text: str) -> str | None:
    """The language that most words of a text are frequent words of.

    Args:
        text: The text.

    Returns:
        A name in `LANGUAGES`; ``None`` if none of the words is known, or two languages are level.
    """
    words = re.findall(r"\w+", text.casefold())
    counts = {name: sum(word in known for word in words) for name, known in _WORDS.items()}
    best = max(counts, key=lambda name: counts[name])
    return best if list(counts.values()).count(counts[best]) == 1 else None
