"""The contract: the hooks a policy may implement, in the order the engine calls them.

Axis letters, used for every shape in kvpolicy:

    S     slots of the engine             T     rows in the slab now
    B     sequences in this call          K     rows that stay after a compaction
    H_q   query heads                     W     most recent queries the engine remembers
    H_kv  key/value heads                 D     size of one head
    L     tokens of one forward           M     size of the hidden state

A policy implements only the hooks it needs, and in each names only the arguments it reads:
pluggy passes by name, and the engine computes only what some policy in the layer's stack
names. Arguments are only ever added. Returning ``None`` means "no opinion".

Tensors come without padding: every sequence of one call has the same number of rows, every row
is a real token, and all heads are there. They may be views of the cache: read, never write them.

`allocate` is asked once, before anything runs, `due` to `evict` at compactions, `schedule` at
admissions, `observe` at both and every buffer of tokens. Only `steer` runs in the inner loop.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvpolicy.markers import hookspec

if TYPE_CHECKING:
    from kvpolicy.cache.rows import LayerRows, Tracks
    from kvpolicy.engine.request import Waiting
    from kvpolicy.hooks.parts import Parts
    from kvpolicy.registers import Registers
    from kvpolicy.state import Memory


@hookspec(firstresult=True)
def allocate(
    layer_indices: Sequence[int], budget: int, total: int, floors: Sequence[int], num_layers: int
) -> Sequence[int] | None:
    """Share the rows of some layers among them; `kvpolicy.toolkit` has a function for weights.

    Called once for each group of layers, when a plan is resolved for a model. The first policy
    to answer wins; if nobody answers, every layer gets the budget.

    Args:
        layer_indices: Decoder layers of the group, counted from 0, rising.
        budget: Rows that stay, as the plan says: the mean of the layers.
        total: Rows to share, ``budget`` times the number of these layers.
        floors: Rows that each layer's policies protect, at least 1; their sum fits ``total``.
        num_layers: Decoder layers of the model.

    Returns:
        A whole number for each layer, none below its floor, their sum exactly ``total``.
    """


@hookspec(firstresult=True)
def schedule(
    waiting: "Sequence[Waiting]", num_free: int, num_active: int
) -> list[list[int]] | None:
    """Choose which requests are admitted next, and which are prefilled together.

    Called when slots are free and requests wait. The first policy to answer wins; if nobody
    answers, requests are admitted in order of arrival, as one group.

    Args:
        waiting: Requests without a slot, in order of arrival; each has ``id``,
            ``prompt_len`` (tokens) and ``max_new_tokens``.
        num_free: Free slots, at least 1.
        num_active: Sequences being decoded in the other slots.

    Returns:
        Groups of request ids; a group is prefilled in one batch, groups one after another. At
        most ``num_free`` ids, all waiting, none twice; none at all, which means to wait, only
        while sequences are being decoded. Anything else raises `HookResultError`.
    """


@hookspec
def observe(
    token_ids: Tensor,
    hidden_states: Tensor,
    start: int,
    prompt_len: int,
    tokenizer: Any,
    registers: "Registers",
    memory: "Memory",
) -> None:
    """Look at the newest tokens of one sequence.

    Called once for all layers that share the stack: after each chunk of the prompt, before a
    compaction, and whenever the smallest buffer of these layers has filled. Every token is
    shown once, in order, when its forward is done. All policies that implement it are told.

    Args:
        token_ids: The tokens since the last call, ``[L]``, int64, on the CPU.
        hidden_states: Their last hidden states, ``[L, M]``, after the final norm. Read only.
        start: Place of the first of them in the sequence; 0 in the first call.
        prompt_len: Tokens of the prompt, which may not all be in yet.
        tokenizer: The engine's, or ``None``.
        registers: The policy's own numbers for this sequence, which `steer` is given, too:
            ``registers.of(self)["name"]`` is ``[1]``, fp32, 0 in the first call, to be changed
            in place. Names are declared in the class attribute ``registers``, a tuple.
        memory: What this policy remembers of it: ``memory.of(self)[0]``.

    Returns:
        Nothing. Anything else raises `HookResultError`.
    """


@hookspec
def steer(
    layer_idx: int,
    hidden_states: Tensor,
    token_ids: Tensor,
    tokenizer: Any,
    registers: "Registers",
    memory: "Memory",
) -> Tensor | None:
    """Change the hidden states that enter one layer.

    Called in every decode step, for each layer whose stack implements it. Answers are summed.
    Must be pure tensor work: no ``.item()``, no branches on values.

    Args:
        layer_idx: Decoder layer, counted from 0.
        hidden_states: Residual stream entering the layer, ``[B, M]``, one row per sequence.
        token_ids: The tokens these states belong to, ``[B]``, int64, on the same device.
        tokenizer: The engine's tokenizer, or ``None``.
        registers: ``registers.of(self)["name"]`` is ``[B]``, fp32, to be changed in place.
        memory: What this policy remembers of each sequence: ``memory.of(self)[b]``.

    Returns:
        A change to add, ``[B, M]``, in their dtype. Another shape raises `HookResultError`.
    """


@hookspec(firstresult=True)
def due(
    layer_idx: int, num_rows: Tensor, seq_len: Tensor, prompt_len: Tensor, budget: int, buffer: int
) -> Tensor | None:
    """Say which sequences are to be compacted now.

    Called per layer after every forward in which the whole prompt is in. The first policy to
    answer wins; if nobody answers, a sequence is due when its buffer is full. Whatever the
    answer, a full slab is compacted, and a sequence within its budget is not.

    Args:
        layer_idx: Decoder layer, counted from 0.
        num_rows: Rows each sequence holds in this layer, ``[B]``, int64, on the CPU.
        seq_len: Tokens each sequence has seen, ``[B]``, int64, on the CPU.
        prompt_len: Tokens of each prompt, ``[B]``, int64, on the CPU.
        budget: Rows that stay after a compaction.
        buffer: Rows that may join before the slab is full.

    Returns:
        Bool ``[B]``. Another shape or dtype raises `HookResultError`.
    """


@hookspec(firstresult=True)
def score(
    layer_idx: int,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    queries: Tensor,
    attn_weights: Tensor,
    attn_sums: Tensor,
    seq_len: Tensor,
    budget: int,
    tracks: "Tracks",
    memory: "Memory",
    parts: "Parts",
) -> Tensor | None:
    """Rate how much each row of one layer is worth keeping.

    Called per layer at a compaction. The first policy to answer wins (the last one of the
    stack is asked first); wrappers adjust it. If nobody answers, newer rows score higher.

    Args:
        layer_idx: Decoder layer, counted from 0.
        keys: Keys after RoPE, ``[B, H_kv, T, D]``. Read only.
        values: Values, ``[B, H_kv, T, D]``. Read only.
        positions: Place of each row's token in the full sequence, ``[B, H_kv, T]``, int64,
            strictly rising along ``T``. Gaps are tokens already evicted.
        queries: The last ``W`` queries after RoPE, ``[B, H_q, W, D]``, oldest first: times keys
            and ``D ** -0.5``, the model's logits before any soft cap. ``W`` is the largest
            ``window_size`` of the policies in the stack (1 if none has one).
        attn_weights: Their softmax weights over the rows they see, as the model computes them
            (scaled, capped, less the share of learned sinks), ``[B, H_q, W, T]``, fp32.
        attn_sums: Softmax weights every row has received from all past queries, summed over
            the queries and over the query heads of the group, ``[B, H_kv, T]``, fp32.
        seq_len: Tokens each sequence has seen, ``[B]``, int64, on the CPU.
        budget: Rows that stay.
        tracks: The policy's own numbers, which travel with the rows: ``tracks["name"]`` is ``[B,
            H_kv, T]``, fp32, 0 for new rows; to be assigned to, for a change in place may be lost.
        memory: What this policy remembers of each sequence: ``memory.of(self)[b]``.
        parts: ``parts.of(self)`` asks the policies that this one is made of, in the order of its
            attribute ``parts``: a list of ``[B, H_kv, T]``, fp32.

    Returns:
        Scores ``[B, H_kv, T]``, floating point, higher stays. ``inf`` pins a row, ``-inf``
        offers it first. NaN or another shape raises `HookResultError`.
    """


@hookspec(firstresult=True)
def select(
    layer_idx: int, scores: Tensor, positions: Tensor, budget: int, memory: "Memory"
) -> Tensor | None:
    """Choose the rows that stay.

    Called per layer at a compaction, after `score`. The first policy to answer wins; if
    nobody answers, the ``budget`` rows with the highest scores stay, the newer one of two
    equals.

    Args:
        layer_idx: Decoder layer, counted from 0.
        scores: Final scores, ``[B, H_kv, T]``, fp32.
        positions: Place of each row's token in the full sequence, ``[B, H_kv, T]``, int64.
        budget: The most rows that may stay.
        memory: What this policy remembers of each sequence: ``memory.of(self)[b]``.

    Returns:
        Row indices ``[B, H_kv, K]``, int64, strictly rising along ``K``, ``1 <= K <=
        budget``. Anything else raises `HookResultError`.
    """


@hookspec(firstresult=True)
def evict(layer_idx: int, rows: "LayerRows", keep: Tensor, memory: "Memory") -> bool | None:
    """Do away with the rows that leave.

    Called per layer at a compaction, after `select`. The first policy to answer ``True``
    has done it; if nobody does, leaving rows are forgotten by compacting the slab in place.

    Args:
        layer_idx: Decoder layer, counted from 0.
        rows: ``keys``, ``values`` and ``positions`` as in `score`; ``rows.keep(keep, keys=...,
            values=...)`` makes the chosen rows, or replacements ``[B, H_kv, K, D]``, the new
            contents; ``rows.rotate(keys, by)``: keys as they would be ``by`` positions later.
        keep: Row indices that stay, ``[B, H_kv, K]``, int64, rising.
        memory: What this policy remembers of each sequence: ``memory.of(self)[b]``.

    Returns:
        ``True`` when done. Done without having called ``rows.keep``, or with other rows
        than ``keep``, raises `HookResultError`.
    """
