"""Models that are refused."""

from collections.abc import Callable
from pathlib import Path

from tiny import bpe_tokenizer, tiny_model

from kvpolicy import Engine, Plan, load_model
from kvpolicy.model.chat import ChatEncoder


def without_configuration(folder: Path) -> object:
    (folder / "weights").mkdir()
    return load_model(folder / "weights")


def with_end_token(value: object) -> Engine:
    model = tiny_model()
    model.generation_config.eos_token_id = value
    return Engine(model, plan=Plan.uniform("full"))


def chat(content: str, **variables: object) -> list[int]:
    """A chat whose template puts contents into brackets, and can think."""
    tokenizer = bpe_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.chat_template = (
        "{% if thinking %}!{% endif %}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    return ChatEncoder(tokenizer).tokens(
        [{"role": "user", "content": content}], variables=variables
    )


CASES: dict[str, Callable[[Path], object]] = {
    "a folder without a model": without_configuration,
    "a dtype that is none": lambda folder: load_model(folder, dtype=3),  # type: ignore[arg-type]
    "an end token that is none": lambda _: with_end_token([1, "end"]),
    "a message that a template makes a token of": lambda _: chat("end>"),
    "a variable that a template does not have": lambda _: chat("a", thinkin=True),
}
