"""The contract: the hooks a policy may implement, in the order the engine calls them.

Axis letters, used for every shape in kvpolicy:

    S     slots of the engine             T     rows in the slab now
    B     sequences in this call          K     rows that stay after a compaction
    H_q   query heads                     W     most recent queries the engine remembers
    H_kv  key/value heads                 D     size of one head
    L     tokens of one forward           M     size of the hidden state
    N     tokens of several sequences, side by side
    P     tokens of a lookahead

A policy implements only the hooks it needs, and in each names only the arguments it reads:
pluggy passes by name, and the engine computes only what some policy in the layer's stack
names. New arguments may be added later; none is removed. ``None`` means "no opinion".

Where several layers attend to the rows of one, hooks are called for that one, and ``H_q`` counts
the query heads of all of them, those of a KV head side by side.

Tensors have no padding: all sequences of one call have the same number of rows, every row is a
real token, and all heads are included. They may be views of the cache: do not write to them.
Only where a plan says ``heads = "shared"`` may KV heads hold different numbers of rows: ``T`` is
that of the fullest, the last column is the newest row of each head, and columns that a head has no
row for come first, with position -1 and 0 in all other tensors. Policies that work with such rows
declare ``ragged = True``; a plan with others in such a layer is refused.

If a plan says ``prompt = "keep"``, the hooks of compactions are told of the rows behind the prompt
only: ``T``, ``K``, ``num_rows`` and ``budget`` count these, and the others stay. Attention sums and
weights are shares of what the model attends to, the prompt's rows included.

`allocate` and `bind` are called before anything runs; `schedule` at admissions; `due` before a
forward, for the sequences of the one before; `protect`, `score`, `select` and `evict` at
compactions, `lookahead` before them. `observe` is called after each chunk of a prompt, then for
every buffer of tokens and before a compaction. `annotate` is called within the forwards of a
prompt, then when `observe` is. Inside the decode step run only `steer`, and `annotate` of policies
that declare ``annotates_in_step = True``. Unless some policy names ``layer_idx`` or ``bound`` in
`due`, `protect`, `score` or `select`, these are called for several layers at once: an entry of the
batch axis is a sequence in a layer then. A hook that some knobs make unnecessary is declared with
``@hookimpl(when="NAME")``: it is there only where that attribute of the policy is true.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvpolicy.cache.rows import LayerRows, Tracks
from kvpolicy.markers import hookspec
from kvpolicy.state import Bound, LayerWeights, Lookahead, Memory, Parts, Registers, WaitingRequest


@hookspec(firstresult=True)
def allocate(
    layer_indices: Sequence[int], budget: int, total: int, floors: Sequence[int], num_layers: int
) -> Sequence[int] | None:
    """Divide the rows of a group of layers among them.

    Called once for each group of layers, when a plan is resolved for a model. The first policy
    to answer wins; if none answers, the first answer of a part counts, and without one every layer
    gets the budget. `kvpolicy.toolkit.largest_remainder` divides rows by weights.

    Args:
        layer_indices: Decoder layers of the group, counted from 0, rising.
        budget: Rows that stay, from the plan: the mean over the layers.
        total: Rows to divide, ``budget`` times the number of these layers.
        floors: Rows that each layer's policies protect, at least 1; their sum fits ``total``.
        num_layers: Decoder layers of the model.

    Returns:
        An integer for each layer, none below its floor, their sum exactly ``total``. Anything
        else raises `HookResultError`.
    """


@hookspec
def bind(layer_idx: int, weights: LayerWeights) -> Any:
    """Read the weights of one layer's attention.

    Called once for each layer, when an engine is built. Every policy that implements it is called
    on its own, and in that layer `annotate` and `score` find what it returns in their argument
    `bound`; the policy itself stays a value.

    Args:
        layer_idx: Decoder layer, counted from 0.
        weights: The projections to queries, keys and values, and that of the output, by head:
            ``weights.q`` is ``[H_q, D, M]``, ``weights.k`` and ``weights.v`` are ``[H_kv, D, M]``,
            ``weights.o`` is ``[H_q, M, D]``. Read only.

    Returns:
        Anything; a tensor should be on the device of the weights. Weights that are changed in place
        raise `HookResultError`.
    """


@hookspec(firstresult=True)
def schedule(
    waiting: Sequence[WaitingRequest], num_free: int, num_active: int
) -> list[list[int]] | None:
    """Choose which requests are admitted next, and which are prefilled together.

    Called when slots are free and requests wait. The first policy to answer wins; if none
    answers, requests are admitted in the order in which they wait, as one group.

    Args:
        waiting: Requests without a slot, those of higher priority first, equal ones in order of
            arrival; each has ``id``, ``prompt_len`` (tokens), ``max_new_tokens`` and ``priority``.
        num_free: Free slots, at least 1.
        num_active: Sequences in the other slots, which are being prefilled or decoded.

    Returns:
        Groups of request ids. Each group is prefilled in one batch, one group after another;
        where prefill and decode steps take turns, groups take turns, too. At most ``num_free``
        ids, all waiting, none twice. No id at all means to wait and is valid only while other
        slots have sequences. Anything else raises `HookResultError`.
    """


@hookspec
def annotate(
    layer_idx: int, states: Tensor, keys: Tensor, values: Tensor, positions: Tensor, bound: Bound
) -> Mapping[str, Tensor] | None:
    """Give new rows of one layer numbers that move with them.

    Called per layer for new tokens: in prefill within the forward, for those of all its sequences;
    in decode for those of one sequence whenever the smallest buffer of these layers is full (at
    most 128 tokens), and before a compaction. Policies that declare ``annotates_in_step = True``
    are called in every decode step instead, for the newest token of every slot; their code must be
    pure tensor work. Every policy that implements it is called on its own, and the numbers are
    there whenever `score` is called.

    Args:
        layer_idx: Decoder layer, counted from 0.
        states: Input of the layer's attention, ``[N, M]``: after the input norm, before the
            projections to queries, keys and values. Read only.
        keys: Keys after RoPE, ``[N, H_kv, D]``. Read only.
        values: Values, ``[N, H_kv, D]``. Read only.
        positions: Position of each token in its sequence, ``[N]``, int64.
        bound: ``bound.of(self)`` is what the policy's own `bind` has returned for this layer;
            ``None`` if it does not implement `bind`.

    Returns:
        Numbers for the rows of these tokens, ``[N, H_kv]``, floating point, by the name of a track
        that the policy declares. Those of a token must not depend on the other tokens of the call.
        Anything else raises `HookResultError`.
    """


@hookspec
def observe(
    token_ids: Tensor,
    hidden_states: Tensor,
    start: int,
    prompt_len: int,
    tokenizer: Any,
    registers: Registers,
    memory: Memory,
) -> None:
    """Read the newest tokens of one sequence.

    Called once for all layers that share the stack: after each chunk of the prompt, before a
    compaction, and whenever the smallest buffer of these layers is full. Every token is shown
    once, in order, after its forward. All policies that implement it are called.

    Args:
        token_ids: The tokens since the last call, ``[L]``, int64, on the CPU.
        hidden_states: Their last hidden states, ``[L, M]``, after the final norm. Read only.
        start: Position of the first of them in the sequence; 0 in the first call.
        prompt_len: Tokens of the prompt; it may not have been prefilled completely yet.
        tokenizer: The engine's tokenizer, or ``None``.
        registers: The policy's own numbers for this sequence, shared with `steer`:
            ``registers.of(self)["name"]`` is ``[1]``, fp32, 0 in the first call; change it in
            place. Declare the names in the class attribute ``registers``, a tuple.
        memory: The policy's own dict for this sequence: ``memory.of(self)[0]``.

    Returns:
        Nothing. Anything else raises `HookResultError`.
    """


@hookspec
def steer(
    layer_idx: int,
    hidden_states: Tensor,
    token_ids: Tensor,
    tokenizer: Any,
    registers: Registers,
    memory: Memory,
) -> Tensor | None:
    """Change the hidden states that enter one layer.

    Called in every decode step, in the layers that the policy declares in the class attribute
    ``steers``, without it in all that it serves. The answers are added up. The code must be pure
    tensor work: no ``.item()``, no branches on values.

    Args:
        layer_idx: Decoder layer, counted from 0.
        hidden_states: Residual stream entering the layer, ``[B, M]``, one row per sequence.
        token_ids: The tokens these states belong to, ``[B]``, int64, on the same device.
        tokenizer: The engine's tokenizer, or ``None``.
        registers: ``registers.of(self)["name"]`` is ``[B]``, fp32; change it in place.
        memory: The policy's own dict for each sequence: ``memory.of(self)[b]``.

    Returns:
        The change to add, ``[B, M]``, in their dtype. Another shape raises `HookResultError`.
    """


@hookspec(firstresult=True)
def due(
    layer_idx: int,
    num_rows: Tensor,
    seq_len: Tensor,
    prompt_len: Tensor,
    budget: int,
    buffer: int,
    memory: Memory,
) -> Tensor | None:
    """Choose which sequences are compacted now.

    Called per layer before a forward, for those sequences of the one before whose whole prompt is
    prefilled. The first policy to answer wins; if none answers, the first answer of a part counts,
    and without one a sequence is compacted when its buffer is full. A full slab is compacted and a
    sequence within its budget is not, whatever the answer.

    Args:
        layer_idx: Decoder layer, counted from 0.
        num_rows: Rows each sequence holds in this layer, ``[B]``, int64, on the CPU; without those
        of a prompt that stays, and those of a head in the mean, rounded up, if heads share
        them.
        seq_len: Tokens of each sequence so far, ``[B]``, int64, on the CPU.
        prompt_len: Tokens of each prompt, ``[B]``, int64, on the CPU.
        budget: Rows that stay after a compaction.
        buffer: Rows that may be added before the slab is full.
        memory: The policy's own dict for each sequence: ``memory.of(self)[b]``.

    Returns:
        Bool ``[B]``. Another shape or dtype raises `HookResultError`.
    """


@hookspec(firstresult=True)
def lookahead(
    token_ids: Tensor, seq_len: int, prompt_len: int, tokenizer: Any, memory: Memory
) -> Lookahead | None:
    """Name tokens whose queries are wanted: what the sequence might attend to.

    Called before a compaction, for one sequence at a time, once for all layers that share the
    stack. The first policy to answer wins; if none answers, the first answer of a part counts.
    The tokens are run through the model as if they followed, over the rows held now, and
    forgotten; `score` gets their queries as ``lookahead_queries``. Nothing is observed or steered.

    Args:
        token_ids: The tokens of the sequence so far, ``[seq_len]``, int64, on the CPU.
        seq_len: How many they are.
        prompt_len: Tokens of the prompt; see `score`.
        tokenizer: The engine's tokenizer, or ``None``.
        memory: The policy's own dict for this sequence: ``memory.of(self)[0]``.

    Returns:
        ``Lookahead(token_ids=...)``, or ``Lookahead(num_greedy=n)``: the next ``n`` tokens of the
        prompt, if so many are left of it; else the token that comes next and those that the model
        finds likeliest after it, up to a stop token of the model, which is left out. From 1 to
        ``lookahead_size`` tokens; those beyond the model's positions are left out. Anything else
        raises `HookResultError`.
    """


@hookspec
def protect(
    layer_idx: int,
    positions: Tensor,
    seq_len: Tensor,
    prompt_len: Tensor,
    is_image: Tensor,
    budget: int,
    memory: Memory,
) -> Tensor | None:
    """Say which rows must stay, whatever they score.

    Called per layer at a compaction, before `score`. A row stays if any policy or part protects
    it. A number of first or newest rows that does not depend on these arguments is declared in
    the class attribute ``protects = (first, newest)`` instead, which needs no hook. If more rows
    of a head are protected than stay, those in ``protects`` come first, then the newest.

    Args:
        layer_idx: Decoder layer, counted from 0.
        positions: Position of each row's token in the full sequence, ``[B, H_kv, T]``, int64.
        seq_len: Tokens of each sequence so far, ``[B]``, int64, on the CPU.
        prompt_len: Tokens of each prompt, ``[B]``, int64, on the CPU; see `score`.
        is_image: Rows that belong to images, bool ``[B, H_kv, T]``; see `score`.
        budget: Rows that stay.
        memory: The policy's own dict for each sequence: ``memory.of(self)[b]``.

    Returns:
        Bool ``[B, H_kv, T]``. Another shape or dtype raises `HookResultError`.
    """


@hookspec(firstresult=True)
def score(
    layer_idx: int,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    queries: Tensor,
    lookahead_queries: Tensor,
    attn_weights: Tensor,
    attn_sums: Tensor,
    attn_squares: Tensor,
    attn_squares_logit: Tensor,
    attn_squares_logit2: Tensor,
    seq_len: Tensor,
    prompt_len: Tensor,
    num_new: Tensor,
    is_image: Tensor,
    budget: int,
    protected: Tensor,
    tracks: Tracks,
    memory: Memory,
    parts: Parts,
    bound: Bound,
) -> Tensor | None:
    """Score how important it is to keep each row of one layer.

    Called per layer at a compaction, after `protect`. The first policy to answer wins (the last
    one of the stack is called first); wrappers adjust the scores. If none answers, newer rows
    score higher. Rows that are protected are scored like all others, so that a wrapper sees what
    they are worth; the engine lets them stay afterwards.

    Args:
        layer_idx: Decoder layer, counted from 0.
        keys: Keys after RoPE, ``[B, H_kv, T, D]``. Read only.
        values: Values, ``[B, H_kv, T, D]``. Read only.
        positions: Position of each row's token in the full sequence, ``[B, H_kv, T]``, int64,
            strictly rising along ``T``. Gaps are tokens already evicted.
        queries: The last ``W`` queries after RoPE, ``[B, H_q, W, D]``, oldest first; multiplied
            with the keys and ``D ** -0.5`` they give the model's logits before any soft cap.
            ``W`` is the largest ``window_size`` of the policies in the stack (1 if none has
            one).
        lookahead_queries: Queries after RoPE of the tokens that `lookahead` has named, scaled like
            ``queries``, ``[B, H_q, P, D]``; they come after all rows. ``None`` without a lookahead.
        attn_weights: Softmax weights of these queries over the rows they see, as the model
            computes them (with scaling, soft cap and learned sinks), ``[B, H_q, W, T]``, fp32.
        attn_sums: Softmax weights ``A`` each row has received from all past queries, summed over
            the queries and over the query heads of the group, ``[B, H_kv, T]``, fp32.
        attn_squares: Their squares ``A^2``, summed likewise.
        attn_squares_logit: ``A^2 Z``, summed likewise, with the logits ``Z`` that the softmax
            reads: scaled, and after any soft cap.
        attn_squares_logit2: ``A^2 Z^2``, summed likewise.
        seq_len: Tokens of each sequence so far, ``[B]``, int64, on the CPU.
        prompt_len: Tokens of each prompt, ``[B]``, int64, on the CPU; at a compaction within
            the prefill it exceeds ``seq_len``. In a conversation, the tokens before the answer
            being generated, earlier turns included.
        num_new: Tokens of each sequence since its last compaction in this layer, all of them
            at the first, without those of a prompt that stays, ``[B]``, int64, on the CPU. Each is
            one query that has added to ``attn_sums`` since.
        is_image: Rows that belong to images, bool ``[B, H_kv, T]``: of tokens of a prompt in whose
            place the model puts what it makes of an image, a frame or sound. None without images.
        budget: Rows that stay.
        protected: Rows that stay in any case, bool ``[B, H_kv, T]``: those that policies of the
            stack declare or that `protect` names, as far as they fit into the budget.
        tracks: The policy's own numbers per row, which move with the rows: ``tracks["name"]``
            is ``[B, H_kv, T]``, fp32, what `annotate` has given new rows and else 0. Assign to it;
            a change in place may be lost.
        memory: The policy's own dict for each sequence: ``memory.of(self)[b]``.
        parts: ``parts.of(self)`` calls the policies that this one combines, in the order of
            its attribute ``parts``; a list of ``[B, H_kv, T]``, fp32.
        bound: ``bound.of(self)`` is what the policy's own `bind` has returned for this layer; see
            `annotate`.

    Returns:
        Scores ``[B, H_kv, T]``, floating point, higher stays. ``-inf`` makes a row leave first, and
        ``inf`` keeps it before all others but the protected ones; rows that must stay are for
        `protect`. NaN or another shape raises `HookResultError`.
    """


@hookspec(firstresult=True)
def select(
    layer_idx: int,
    scores: Tensor,
    positions: Tensor,
    prompt_len: Tensor,
    budget: int,
    heads: str,
    memory: Memory,
) -> Tensor | None:
    """Choose the rows that stay.

    Called per layer at a compaction, after `score`. The first policy to answer wins; if none
    answers, the ``budget`` rows of each head with the highest scores stay, of equal scores the
    newer ones.

    Args:
        layer_idx: Decoder layer, counted from 0.
        scores: Final scores, ``[B, H_kv, T]``, fp32; ``inf`` for protected rows, ``-inf`` where a
            head has no row.
        positions: Position of each row's token in the full sequence, ``[B, H_kv, T]``, int64; -1
            where a head has no row.
        prompt_len: Tokens of each prompt, ``[B]``, int64, on the CPU; see `score`.
        budget: The most rows that may stay: of each head, or in the mean over the heads.
        heads: ``"own"``: each head has the budget for itself. ``"shared"``: all heads of the layer
            have ``budget * H_kv`` rows together.
        memory: The policy's own dict for each sequence: ``memory.of(self)[b]``.

    Returns:
        Row indices ``[B, H_kv, K]``, int64, strictly rising along ``K``, ``1 <= K <=
        budget``. Where ``heads`` is ``"shared"``, also a mask: bool ``[B, H_kv, T]``, true for rows
        that stay, at least 1 of each head and at most ``budget * H_kv`` of a sequence. No answer
        names a column that a head has no row for. Anything else raises `HookResultError`.
    """


@hookspec(firstresult=True)
def evict(layer_idx: int, rows: LayerRows, keep: Tensor, memory: Memory) -> bool | None:
    """Remove the rows that do not stay.

    Called per layer at a compaction, after `select`. The first policy to answer ``True`` wins;
    if none does, the slab is compacted in place.

    Args:
        layer_idx: Decoder layer, counted from 0.
        rows: ``keys``, ``values`` and ``positions`` as in `score`. ``rows.keep(keep, keys=...,
            values=...)`` stores the chosen rows, or replacements ``[B, H_kv, K, D]``;
            ``rows.rotate(keys, by)`` returns keys moved by ``by`` positions.
        keep: What `select` answered: row indices ``[B, H_kv, K]``, int64, rising; or, where heads
            share their rows, a mask, bool ``[B, H_kv, T]``, with replacements ``[B, H_kv, T, D]``.
        memory: The policy's own dict for each sequence: ``memory.of(self)[b]``.

    Returns:
        ``True`` when done. ``True`` without a call of ``rows.keep`` with ``keep`` raises
        `HookResultError`.
    """
