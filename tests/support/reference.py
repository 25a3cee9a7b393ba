"""Slow oracles: the rows that each method keeps, from the published formulas in plain loops.

Nothing here imports kvpolicy, and nothing is vectorised: an oracle that shares an idea with
the sources would share its mistakes. An oracle takes one KV head of one sequence:

    keys      [T][D]       rows of the cache, oldest first
    queries   [G][W][D]    the last queries of the query heads that share this KV head

and all arithmetic is in double precision. A score list is for the *candidates*, the rows
before the forced window; `with_window` adds the window and returns increasing row indices.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence

Vector = Sequence[float]
Matrix = Sequence[Vector]


def top_rows(scores: Sequence[float], budget: int) -> list[int]:
    """The rows with the highest scores, of equal ones the newer, in increasing order."""
    best_first = sorted(range(len(scores)), key=lambda t: (-scores[t], -t))
    return sorted(best_first[:budget])


def with_window(scores: Sequence[float], window: int, budget: int) -> list[int]:
    """The best ``budget - window`` candidates and the ``window`` rows after them."""
    newest = [len(scores) + i for i in range(window)]
    return top_rows(scores, budget - window) + newest


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def softmax(logits: Sequence[float]) -> list[float]:
    peak = max(logits)
    powers = [math.exp(x - peak) for x in logits]
    total = math.fsum(powers)
    return [p / total for p in powers]


def attention(query: Vector, keys: Matrix) -> list[float]:
    """Weights of one query over all rows given."""
    return softmax([dot(query, key) / math.sqrt(len(query)) for key in keys])


def pool(values: Sequence[float], kernel: int, kind: str) -> list[float]:
    """1-D pooling, stride 1, ``kernel // 2`` on both sides.

    The maximum ignores values outside; the mean counts them as zeros, as torch does by
    default, so values at the edges are reduced.
    """
    half = kernel // 2
    pooled = []
    for t in range(len(values)):
        seen = [values[i] for i in range(t - half, t + half + 1) if 0 <= i < len(values)]
        pooled.append(max(seen) if kind == "maxpool" else math.fsum(seen) / kernel)
    return pooled


# --- StreamingLLM ---------------------------------------------------------------------------


def streaming(num_rows: int, budget: int, n_sink: int) -> list[int]:
    """The first ``n_sink`` rows and the newest ones, together ``budget``."""
    if num_rows <= budget:
        return list(range(num_rows))
    return [t for t in range(num_rows) if t < n_sink or t >= num_rows - (budget - n_sink)]


def rotated(key: Vector, by: int, theta: float = 10_000.0) -> list[float]:
    """RoPE: element i of the first half of a head and element i of the second are a 2-D point."""
    half = len(key) // 2
    out = [float(x) for x in key]
    for i in range(half):
        angle = by * theta ** (-i / half)
        x, y = float(key[i]), float(key[i + half])
        out[i] = x * math.cos(angle) - y * math.sin(angle)
        out[i + half] = x * math.sin(angle) + y * math.cos(angle)
    return out


class StreamingLlama:
    """A Llama that reads one token at a time and rotates by cache index, as published.

    Keys are stored before RoPE. In every step they are rotated by their row index, and the query
    by the last one. When the cache is full, it keeps the sinks and the newest rows.
    """

    def __init__(
        self,
        weights: dict[str, Matrix],
        *,
        head_dim: int,
        theta: float,
        eps: float,
        n_sink: int,
        budget: int,
        buffer: int,
    ) -> None:
        self.weights = weights
        self.head_dim, self.theta, self.eps = head_dim, theta, eps
        self.n_sink, self.budget, self.buffer = n_sink, budget, buffer
        self.num_layers = 1 + max(
            int(name.split(".")[2]) for name in weights if name.startswith("model.layers.")
        )
        self.cache: list[list[tuple[list[Vector], list[Vector]]]] = [
            [] for _ in range(self.num_layers)
        ]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens after a prompt."""
        for token in prompt:
            logits = self.read(token)
        tokens = [max(range(len(logits)), key=lambda i: logits[i])]
        while len(tokens) < num_tokens:
            logits = self.read(tokens[-1])
            tokens.append(max(range(len(logits)), key=lambda i: logits[i]))
        return tokens

    def read(self, token: int) -> list[float]:
        """Read one token and return the logits."""
        state = [float(x) for x in self.weights["model.embed_tokens.weight"][token]]
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}."
            change = self._attend(layer, self._norm(name + "input_layernorm.weight", state))
            state = [x + y for x, y in zip(state, change, strict=True)]
            normed = self._norm(name + "post_attention_layernorm.weight", state)
            gate = self._times(name + "mlp.gate_proj.weight", normed)
            up = self._times(name + "mlp.up_proj.weight", normed)
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            change = self._times(name + "mlp.down_proj.weight", inner)
            state = [x + y for x, y in zip(state, change, strict=True)]
        for layer in range(self.num_layers):
            rows = self.cache[layer]
            if len(rows) == self.budget + self.buffer:
                stay = streaming(len(rows), self.budget, self.n_sink)
                self.cache[layer] = [rows[t] for t in stay]
        return self._times("lm_head.weight", self._norm("model.norm.weight", state))

    def _attend(self, layer: int, state: Vector) -> list[float]:
        name = f"model.layers.{layer}.self_attn."
        queries, keys, values = (
            self._heads(self._times(f"{name}{letter}_proj.weight", state)) for letter in "qkv"
        )
        rows = self.cache[layer]
        rows.append((keys, values))
        group = len(queries) // len(keys)
        mixed: list[float] = []
        for h, query in enumerate(queries):
            seen = [rotated(row[0][h // group], t, self.theta) for t, row in enumerate(rows)]
            weights = attention(rotated(query, len(rows) - 1, self.theta), seen)
            mixed += [
                math.fsum(w * row[1][h // group][d] for w, row in zip(weights, rows, strict=True))
                for d in range(self.head_dim)
            ]
        return self._times(name + "o_proj.weight", mixed)

    def _heads(self, flat: Vector) -> list[Vector]:
        return [flat[i : i + self.head_dim] for i in range(0, len(flat), self.head_dim)]

    def _times(self, name: str, vector: Vector) -> list[float]:
        return [dot(row, vector) for row in self.weights[name]]

    def _norm(self, name: str, vector: Vector) -> list[float]:
        size = math.sqrt(math.fsum(x * x for x in vector) / len(vector) + self.eps)
        return [float(w) * x / size for w, x in zip(self.weights[name], vector, strict=True)]


# --- H2O ------------------------------------------------------------------------------------


class HeavyHitters:
    """H2O of one KV head: the attention that each resident row has received in total."""

    def __init__(self, num_query_heads: int) -> None:
        self.sums: list[list[float]] = [[] for _ in range(num_query_heads)]

    def forward(self, keys: Matrix, queries: Sequence[Matrix]) -> None:
        """Attend with ``m`` new queries over the resident rows, the last ``m`` of which are new."""
        for head, head_queries in enumerate(queries):
            sums, num_new = self.sums[head], len(head_queries)
            sums += [0.0] * (len(keys) - len(sums))
            for i, query in enumerate(head_queries):
                visible = len(keys) - num_new + i + 1
                for t, weight in enumerate(attention(query, keys[:visible])):
                    sums[t] += weight

    def scores(self, group_reduce: str = "sum") -> list[float]:
        return [reduce_group(column, group_reduce) for column in zip(*self.sums, strict=True)]

    def keep(self, rows: Iterable[int]) -> None:
        """Drop the sums of evicted rows."""
        rows = list(rows)
        self.sums = [[sums[t] for t in rows] for sums in self.sums]


def reduce_group(values: Sequence[float], how: str) -> float:
    if how == "max":
        return max(values)
    return math.fsum(values) / (len(values) if how == "mean" else 1)


def last_query(keys: Matrix, queries: Sequence[Matrix]) -> list[float]:
    """The "H2O" of R-KV's code: weights of the newest query over all rows but the newest."""
    scale = math.sqrt(len(keys[0]))
    logits = [
        max(dot(head_queries[-1], key) / scale for head_queries in queries) for key in keys[:-1]
    ]
    return softmax(logits) if logits else []


def last_query_of_all_heads(
    keys: Sequence[Matrix], queries: Sequence[Sequence[Matrix]]
) -> list[float]:
    """The "H2O" of SkipKV's code: the same weights, averaged over the KV heads."""
    weights = [last_query(*head) for head in zip(keys, queries, strict=True)]
    return [math.fsum(column) / len(column) for column in zip(*weights, strict=True)]


def sums_and_redundancy(
    sums: Sequence[float], similar: Sequence[float], weight: float
) -> list[float]:
    """Sums over all queries minus R-KV's redundancy, each as shares of the candidates'."""
    return [
        weight * received / math.fsum(sums) - (1 - weight) * surplus / math.fsum(similar)
        for received, surplus in zip(sums, similar, strict=True)
    ]


# --- TOVA -----------------------------------------------------------------------------------


def tova(keys: Sequence[Matrix], queries: Sequence[Sequence[Matrix]]) -> list[float]:
    """Weights of the newest query, averaged over every query head of all KV heads."""
    weights = [
        attention(head_queries[-1], head_keys)
        for head_keys, group in zip(keys, queries, strict=True)
        for head_queries in group
    ]
    return [math.fsum(column) / len(column) for column in zip(*weights, strict=True)]


# --- Knorm ----------------------------------------------------------------------------------


def knorm(keys: Matrix) -> list[float]:
    return [-math.sqrt(dot(key, key)) for key in keys]


# --- Random ---------------------------------------------------------------------------------


def lot(seed: int, layer: int, head: int, position: int) -> float:
    """A number in [0, 1) from a hash of layer, head and position."""

    def mix(x: int) -> int:
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            x ^= x >> shift
            x = (x * factor) % 2**32
        return x ^ (x >> 15)

    drawn = seed
    for counter in (layer, head, position):
        drawn = mix((mix(drawn) + counter) % 2**32)
    return (drawn >> 8) / 2**24


# --- SnapKV ---------------------------------------------------------------------------------


def snapkv(
    keys: Matrix,
    queries: Sequence[Matrix],
    *,
    window_size: int = 8,
    kernel_size: int = 7,
    pooling: str = "maxpool",
) -> list[float]:
    """Decode form, also R-KV's importance: heads are reduced before the softmax."""
    candidates = keys[: len(keys) - window_size]
    scale = math.sqrt(len(keys[0]))
    totals = [0.0] * len(candidates)
    for w in range(-window_size, 0):
        logits = [
            max(dot(head_queries[w], key) / scale for head_queries in queries) for key in candidates
        ]
        for t, weight in enumerate(softmax(logits) if logits else []):
            totals[t] += weight
    return pool([total / window_size for total in totals], kernel_size, pooling)


def snapkv_window(keys: Matrix, queries: Sequence[Matrix], *, window_size: int = 8) -> list[float]:
    """Scores of the window's rows in decode form: mean weights among all rows, not pooled."""
    totals = [0.0] * len(keys)
    scale = math.sqrt(len(keys[0]))
    for w in range(window_size):
        seen = keys[: len(keys) - window_size + w + 1]
        logits = [
            max(dot(one[len(one) - window_size + w], key) / scale for one in queries)
            for key in seen
        ]
        for t, weight in enumerate(softmax(logits)):
            totals[t] += weight
    return [total / window_size for total in totals[len(keys) - window_size :]]


def snapkv_published_window(
    keys: Matrix, queries: Sequence[Matrix], *, window_size: int = 8, group_reduce: str = "mean"
) -> list[float]:
    """Scores of the window's rows in prefill form: as for the others, but not pooled."""
    per_head = []
    for head_queries in queries:
        totals = [0.0] * len(keys)
        for w in range(window_size):
            query = head_queries[len(head_queries) - window_size + w]
            weights = attention(query, keys[: len(keys) - window_size + w + 1])
            for t, weight in enumerate(weights):
                totals[t] += weight
        per_head.append(totals[len(keys) - window_size :])
    return [reduce_group(column, group_reduce) for column in zip(*per_head, strict=True)]


def snapkv_published(
    keys: Matrix,
    queries: Sequence[Matrix],
    *,
    window_size: int = 8,
    kernel_size: int = 7,
    pooling: str = "maxpool",
    group_reduce: str = "mean",
) -> list[float]:
    """Prefill form: causal softmax over all rows, summed over the window, then the group."""
    num_candidates = len(keys) - window_size
    per_head = []
    for head_queries in queries:
        totals = [0.0] * num_candidates
        for w in range(window_size):
            query = head_queries[len(head_queries) - window_size + w]
            visible = keys[: num_candidates + w + 1]
            for t, weight in enumerate(attention(query, visible)[:num_candidates]):
                totals[t] += weight
        per_head.append(totals)
    reduced = [reduce_group(column, group_reduce) for column in zip(*per_head, strict=True)]
    return pool(reduced, kernel_size, pooling)


# --- PyramidKV ------------------------------------------------------------------------------


def pyramid(num_layers: int, budget: int, window: int, beta: float) -> list[float]:
    """Rows of every layer before rounding: even steps around the budget, plus the window."""
    mean = budget - window
    last = mean / beta
    first = 2 * mean - last
    steps = max(num_layers - 1, 1)
    return [window + first - layer * (first - last) / steps for layer in range(num_layers)]


# --- R-KV -----------------------------------------------------------------------------------


def redundancy(
    keys: Matrix, *, similarity_threshold: float = 0.5, retain_direction: str = "last"
) -> list[float]:
    """Softmax over all rows of the mean similarity a row *receives*.

    Each row exempts one row it is similar to: the newest ("last"), or the smallest index where
    rows that are not similar count as index 0 ("first", which is always row 0).
    """
    num_rows = len(keys)
    unit = []
    for key in keys:
        length = math.sqrt(dot(key, key)) + 1e-8
        unit.append([float(x) / length for x in key])
    received = [0.0] * num_rows
    for i in range(num_rows):
        similar = [0.0 if j == i else dot(unit[i], unit[j]) for j in range(num_rows)]
        index = [j if similar[j] > similarity_threshold else 0 for j in range(num_rows)]
        exempt = max(index) if retain_direction == "last" else min(index)
        for j in range(num_rows):
            if j != exempt:
                received[j] += similar[j]
    return softmax([total / num_rows for total in received])


def rkv(
    keys: Matrix,
    queries: Sequence[Matrix],
    *,
    mix_lambda: float = 0.1,
    window_size: int = 8,
    kernel_size: int = 7,
    pooling: str = "maxpool",
    similarity_threshold: float = 0.5,
    retain_direction: str = "last",
) -> list[float]:
    importance = snapkv(
        keys, queries, window_size=window_size, kernel_size=kernel_size, pooling=pooling
    )
    surplus = redundancy(
        keys, similarity_threshold=similarity_threshold, retain_direction=retain_direction
    )
    return [
        mix_lambda * i - (1 - mix_lambda) * r
        for i, r in zip(importance, surplus[: len(importance)], strict=True)
    ]


def rkv_window(
    keys: Matrix,
    queries: Sequence[Matrix],
    *,
    mix_lambda: float = 0.1,
    window_size: int = 8,
    similarity_threshold: float = 0.5,
    retain_direction: str = "last",
) -> list[float]:
    """Scores of the window's rows, which the authors do not score."""
    importance = snapkv_window(keys, queries, window_size=window_size)
    surplus = redundancy(
        keys, similarity_threshold=similarity_threshold, retain_direction=retain_direction
    )
    return [
        mix_lambda * i - (1 - mix_lambda) * r
        for i, r in zip(importance, surplus[-window_size:], strict=True)
    ]


# --- Mix ------------------------------------------------------------------------------------


def mix(
    ratings: Sequence[Sequence[float]], weights: Sequence[float], normalise: str = "rank"
) -> list[float]:
    """Scores of one KV head: the weighted sum of the normalised scores of the parts.

    A row with +inf or -inf in a part keeps that score, and is excluded from the normalisation.
    """
    num_rows = len(ratings[0])
    finite_rows = [t for t in range(num_rows) if all(math.isfinite(part[t]) for part in ratings)]
    total = math.fsum(weights)
    mixed = []
    for t in range(num_rows):
        if t in finite_rows:
            part_scores = [normalised(part, finite_rows, t, normalise) for part in ratings]
            mixed.append(
                math.fsum(w * x / total for w, x in zip(weights, part_scores, strict=True))
            )
        else:
            is_pinned = any(part[t] == math.inf for part in ratings)
            mixed.append(math.inf if is_pinned else -math.inf)
    return mixed


def normalised(part: Sequence[float], finite_rows: Sequence[int], t: int, normalise: str) -> float:
    """One score, normalised among the rows with finite scores."""
    scores = [part[i] for i in finite_rows]
    if normalise == "rank":
        lower = sum(score < part[t] for score in scores)
        equal = sum(score == part[t] for score in scores) - 1
        return (lower + equal / 2) / max(len(scores) - 1, 1)
    if normalise == "sum":
        size = math.fsum(abs(score) for score in scores)
        return part[t] / size if size else 0.0
    if max(scores) == min(scores):
        return 0.0
    if normalise == "minmax":
        return (part[t] - min(scores)) / (max(scores) - min(scores))
    mean = math.fsum(scores) / len(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / len(scores)
    return (part[t] - mean) / math.sqrt(variance)


# --- Merging --------------------------------------------------------------------------------


class Merger:
    """D2O's merging for one KV head: evicted rows are averaged into the nearest kept row."""

    def __init__(self, beta: float = 0.5, weights: str = "exp") -> None:
        self.beta, self.weights = beta, weights
        self.threshold: float | None = None

    def merge(
        self, keys: Matrix, values: Matrix, keep: Sequence[int]
    ) -> tuple[list[list[float]], list[list[float]], float, float]:
        """The new keys and values, and two margins.

        The first is the smallest distance of a similarity from the threshold; the second is the
        smallest lead of a nearest row over the next one.
        """
        nearest, leads = {}, [math.inf]
        for i in range(len(keys)):
            if i not in keep:
                similar = [cosine(keys[i], keys[j]) for j in keep]
                best = max(range(len(keep)), key=lambda place: similar[place])
                nearest[i] = (keep[best], similar[best])
                leads += [similar[best] - u for u in similar[:best] + similar[best + 1 :]]
        mean = math.fsum(u for _, u in nearest.values()) / len(nearest)
        if self.threshold is None:
            self.threshold = mean
        else:
            self.threshold = (1 - self.beta) * self.threshold + self.beta * mean
        merged: dict[int, list[tuple[int, float]]] = {j: [] for j in keep}
        for i, (j, u) in nearest.items():
            if u >= self.threshold:
                merged[j].append((i, u))
        margin = min(abs(u - self.threshold) for _, u in nearest.values())
        new = [
            [self._row(rows, j, merged[j]) if merged[j] else list(rows[j]) for j in keep]
            for rows in (keys, values)
        ]
        return new[0], new[1], margin, min(leads)

    def _row(self, rows: Matrix, j: int, evicted: Sequence[tuple[int, float]]) -> list[float]:
        exponential = self.weights == "exp"
        own = math.exp(cosine([1.0], [1.0])) if exponential else 1.0
        parts = [(i, math.exp(u) if exponential else u) for i, u in evicted]
        total = own + (math.fsum(w for _, w in parts) if exponential else len(parts))
        return [
            math.fsum([own * float(rows[j][d]), *(w * float(rows[i][d]) for i, w in parts)]) / total
            for d in range(len(rows[j]))
        ]


def cosine(a: Vector, b: Vector) -> float:
    lengths = math.sqrt(dot(a, a)) * math.sqrt(dot(b, b))
    return dot(a, b) / lengths if lengths else 0.0


# --- Sampling -------------------------------------------------------------------------------


def sampling_probs(
    logits: Sequence[float], *, temperature: float, top_k: int | None, top_p: float | None
) -> list[float]:
    """Probabilities after temperature, then top-k, then top-p (the order of transformers).

    Top-k keeps every token not below the k-th best. Top-p drops the least likely tokens as long
    as their total probability is at most ``1 - top_p``; at least one token is kept.
    """
    scaled = [x / temperature for x in logits]
    if top_k is not None:
        kth = sorted(scaled, reverse=True)[min(top_k, len(scaled)) - 1]
        scaled = [x if x >= kth else -math.inf for x in scaled]
    if top_p is not None and top_p < 1:
        probs = softmax(scaled)
        worst_first = sorted(range(len(probs)), key=lambda i: probs[i])
        dropped = 0.0
        for i in worst_first[:-1]:
            dropped += probs[i]
            if dropped <= 1 - top_p:
                scaled[i] = -math.inf
    return softmax(scaled)


def nucleus(
    logits: Sequence[float], *, temperature: float, top_k: int, top_p: float
) -> tuple[list[float], float]:
    """As `sampling_probs`, but of equal tokens those with smaller ids count as likelier.

    Also the smallest distance of a cumulative probability from ``top_p``, as rounding may decide
    on which side it is.
    """
    likeliest_first = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    likeliest_first = likeliest_first[: top_k or None]
    probs = softmax([logits[i] / temperature for i in likeliest_first])
    before = [math.fsum(probs[:rank]) for rank in range(len(probs))]
    kept = {
        i: p for i, p, q in zip(likeliest_first, probs, before, strict=True) if q < top_p or q == 0
    }
    total = math.fsum(kept.values())
    margin = min([abs(q - top_p) for q in before[1:]], default=1.0)
    return [kept.get(i, 0.0) / total for i in range(len(logits))], margin


def splitmix64(state: int, num: int) -> list[int]:
    """The first numbers of the generator of Steele, Lea and Flood (2014), as published in C."""
    numbers = []
    for _ in range(num):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        numbers.append(z ^ (z >> 31))
    return numbers


# --- The cache ------------------------------------------------------------------------------


class SlabModel:
    """The contents of a cache: a list of rows for each slot and KV head.

    A row is any object that the test appends; its position is the number of tokens that the
    slot had seen before.
    """

    def __init__(self, num_slots: int, num_kv_heads: int) -> None:
        self.num_kv_heads = num_kv_heads
        self.seen = [0] * num_slots
        self.rows: dict[tuple[int, int], list[tuple[int, object]]] = {
            (slot, head): [] for slot in range(num_slots) for head in range(num_kv_heads)
        }

    def append(self, slot: int, token: Callable[[int], object]) -> None:
        """Add one token; ``token(head)`` is the row of that KV head."""
        for head in range(self.num_kv_heads):
            self.rows[slot, head].append((self.seen[slot], token(head)))
        self.seen[slot] += 1

    def keep(self, slot: int, head: int, rows: Iterable[int]) -> None:
        held = self.rows[slot, head]
        self.rows[slot, head] = [held[t] for t in rows]

    def clear(self, slot: int) -> None:
        self.seen[slot] = 0
        for head in range(self.num_kv_heads):
            self.rows[slot, head] = []

    def positions(self, slot: int, head: int) -> list[int]:
        return [position for position, _ in self.rows[slot, head]]

    def contents(self, slot: int, head: int) -> list[object]:
        return [content for _, content in self.rows[slot, head]]


def steered_tokens(
    prompt: Sequence[str],
    generated: Sequence[str],
    delimiter: str,
    think: tuple[str, str] | None,
) -> list[bool]:
    """SEAL: for every generated token, whether its hidden state is steered."""
    inside = think is None
    answer = []
    for place, token in enumerate([*prompt, *generated]):
        if think is not None and token == think[0]:
            inside = True
        if think is not None and token == think[1]:
            inside = False
        if place >= len(prompt):
            answer.append(inside and delimiter in token)
    return answer


def sentences(ends: Sequence[bool], merge: bool) -> list[tuple[int, int, int]]:
    """SkipKV's sentences in a whole text: (begin, end, end of the first delimiter).

    ``ends[t]`` is true if token t is a delimiter. A regular expression over one letter per token
    splits the whole text at once.
    """
    letters = "".join("d" if end else "w" for end in ends)
    # Delimiters at the start belong to the first sentence.
    pattern = r"((?:\Ad*)?w+d)d*" if merge else r"(w*d)"
    return [(m.start(), m.end(), m.end(1)) for m in re.finditer(pattern, letters)]


def sentence_vectors(states: Matrix, spans: Sequence[tuple[int, int, int]]) -> list[Vector]:
    """Unit mean of the hidden states of each sentence, without merged delimiters."""
    vectors = []
    for begin, _, body_end in spans:
        rows = states[begin:body_end]
        mean = [math.fsum(float(row[m]) for row in rows) / len(rows) for m in range(len(rows[0]))]
        length = math.sqrt(math.fsum(x * x for x in mean)) + 1e-8
        vectors.append([x / length for x in mean])
    return vectors


def redundant_sentences(vectors: Sequence[Vector], tau: float, pair: str) -> dict[int, float]:
    """Sentences repeated later, with the similarity that is subtracted (eqs. 1, 3 and 7)."""
    found: dict[int, float] = {}
    for i, earlier in enumerate(vectors):
        for later in vectors[i + 1 :]:
            similarity = dot(earlier, later)
            if similarity > tau:
                kept = found.get(i, similarity)
                found[i] = max(kept, similarity) if pair == "max" else similarity
    return found


def skipkv(
    base: Sequence[float],
    positions: Sequence[int],
    spans: Sequence[tuple[int, int, int]],
    similarities: dict[int, float],
) -> list[float]:
    """Eq. 6: the token score minus the similarity of the redundant sentence with the token."""
    scores = []
    for score, position in zip(base, positions, strict=True):
        for number, (begin, end, _) in enumerate(spans):
            if begin <= position < end and end - begin > 1 and number in similarities:
                score -= similarities[number]
        scores.append(score)
    return scores
