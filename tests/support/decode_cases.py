"""Slabs with a new token each, and what loops make of them: cases for the operator of decoding."""

from collections.abc import Sequence

import attrs
import slab_reference as reference
import torch
from hypothesis import strategies as st
from strategies import seeds
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.base import DecodeLayer

# fp32 sums of up to 150 terms in another order; 16-bit weights and outputs have 8 bits.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
SUMS_TOLERANCE = 3e-5
# Interpreters of some releases cut bf16 off instead of rounding it: queries times a factor.
WINDOW_TOLERANCE = {torch.bfloat16: 2**-7}
# Powers of a logit in an accumulator: its error grows with them.
POWERS = {"attn_squares_logit": 1, "attn_squares_logit2": 2}


@attrs.define(eq=False)
class Case:
    """Slabs with gaps in their positions, and a new token each."""

    group: int
    dtype: torch.dtype
    tensors: dict[str, Tensor | None] = attrs.field(repr=False)
    options: dict[str, object]
    tracks: list[Tensor] = attrs.field(repr=False)
    accumulated: dict[str, Tensor] = attrs.field(repr=False)

    @property
    def layer(self) -> DecodeLayer:
        names = ("keys", "values", "positions", "rows", "seq_len", "live", "window")
        return DecodeLayer(
            **{name: self.tensors[name] for name in names},
            tracks=self.tracks,
            accumulated=list(self.accumulated.values()),
            accumulators=list(self.accumulated),
            sliding_window=self.options["sliding_window"],
        )

    @property
    def new(self) -> dict[str, object]:
        """What the model gives a layer."""
        names = ("query", "key", "value", "sinks")
        given = {name: self.tensors[name] for name in names}
        return {**given, **{name: self.options[name] for name in ("scaling", "softcap")}}


def operator_arguments(layer: DecodeLayer, new: dict[str, object]) -> tuple[object, ...]:
    """The arguments of the operator."""
    return (
        *(new[name] for name in ("query", "key", "value")),
        *(getattr(layer, field.name) for field in attrs.fields(DecodeLayer)),
        *(new[name] for name in ("scaling", "softcap", "sinks")),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    slides: bool | None = None,
    empty: float = 0.0,
    adjacent: bool = False,
    one_size: bool = True,
    capacities: Sequence[int] = (1, 9, 70, 150),
    dims: Sequence[int] = (8, 20, 64),
    groups: Sequence[int] = (1, 3, 4, 8),
    device: torch.device | str = "cpu",
) -> Case:
    """Cases on a device, with some number in rows that are not held.

    Heads of values have the size of those of keys, or, without ``one_size``, any.

    The slots of a layer may be adjacent, or lie among those of other layers.
    """
    slots, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    group = draw(st.sampled_from(groups))
    dim = draw(st.sampled_from(dims))
    value_dim = dim if one_size else draw(st.sampled_from([dim, 12, 40]))
    capacity = draw(st.sampled_from(capacities))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    slides = draw(st.booleans()) if slides is None else slides
    rng = torch.Generator().manual_seed(draw(seeds))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng)

    def whole(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high + 1, size, generator=rng)

    # A slab among those of other layers: its slots do not lie side by side.
    layer, layers = draw(st.integers(0, 1)), 2
    by_slot = not adjacent and draw(st.booleans())

    def stacked(*size: int, fill: float, dtype: torch.dtype) -> Tensor:
        shape = (slots, layers, *size) if by_slot else (layers, slots, *size)
        stack = torch.full(shape, fill, dtype=dtype, device=device)
        return stack[:, layer] if by_slot else stack[layer]

    most = capacity if slides else capacity - 1
    rows = whole(0, most, slots, heads)
    if slides and draw(st.booleans()):
        rows[:] = capacity  # every slab drops a row
    seq_len = rows.amax(1) + whole(0, 40, slots)
    tensors: dict[str, Tensor | None] = {
        "query": normal(slots, heads * group, dim).to(dtype),
        "key": normal(slots, heads, dim).to(dtype),
        # As models make them: heads behind tokens.
        "value": normal(heads, slots, value_dim).to(dtype).transpose(0, 1),
        "keys": stacked(heads, capacity, dim, fill=empty, dtype=dtype),
        "values": stacked(heads, capacity, value_dim, fill=empty, dtype=dtype),
        "positions": stacked(heads, capacity, fill=-1, dtype=torch.int64),
        "window": None,
        # Cut from the counts of layers with more heads.
        "rows": torch.nn.functional.pad(rows, (0, 1), value=10**6)[:, :heads],
        "seq_len": seq_len,
        "live": torch.rand(slots, generator=rng) < 0.8,
        "sinks": normal(heads * group) if draw(st.booleans()) else None,
    }
    if draw(st.booleans()):
        tensors["window"] = stacked(heads * group, 5, dim, fill=0, dtype=dtype)
    names = draw(st.sets(st.sampled_from(ACCUMULATORS)))
    accumulated = {
        name: stacked(heads, capacity, fill=0, dtype=torch.float32)
        for name in ACCUMULATORS
        if name in names
    }
    tracks = [stacked(heads, capacity, fill=0, dtype=torch.float32) for _ in range(2)]
    for slot in range(slots):
        for head in range(heads):
            num, length = int(rows[slot, head]), int(seq_len[slot])
            old = torch.randperm(length, generator=rng)[:num].sort().values
            tensors["positions"][slot, head, :num] = old.to(device)
            for slab in (tensors["keys"], tensors["values"]):
                slab[slot, head, :num] = normal(num, slab.shape[3]).to(device, dtype)
            for slab in (*tracks, *accumulated.values()):
                slab[slot, head, :num] = normal(num).to(device)
    options = {
        "scaling": draw(st.sampled_from([dim**-0.5, 0.3])),
        "softcap": draw(st.sampled_from([0.0, 5.0])),
        "sliding_window": capacity if slides else draw(st.sampled_from([0, 1, 12])),
    }
    if not slides and options["sliding_window"] == capacity:
        options["sliding_window"] = 0
    moved = {name: None if one is None else one.to(device) for name, one in tensors.items()}
    return Case(group, dtype, moved, options, tracks, accumulated)


@attrs.define(eq=False)
class RaggedCase:
    """The rows of a case in segments of pools.

    Attributes:
        case: The case; its rows are given back by `unpack`.
        layer: The pools; rows are those of a head in the mean.
    """

    case: Case
    layer: DecodeLayer

    @classmethod
    def of(cls, case: Case, num_free: int, empty: float = 0.0) -> "RaggedCase":
        """Pack the rows of a case without a sliding window; ``num_free`` rows are left."""
        named = case.tensors
        assert not case.options["sliding_window"]
        counts = named["rows"].clone()
        num_heads = counts.shape[1]
        mean = -(-counts.sum(dim=1) // num_heads)
        capacity = int(mean.max()) + num_free
        sizes = counts + (capacity - mean)[:, None]
        bounds = torch.nn.functional.pad(sizes.cumsum(dim=1), (1, 0))

        def pooled(slab: Tensor, empty: float) -> Tensor:
            size = (slab.shape[0], num_heads * capacity, *slab.shape[3:])
            pool = torch.full(size, empty, dtype=slab.dtype, device=slab.device)
            for slot, head in torch.cartesian_prod(*map(torch.arange, counts.shape)).view(-1, 2):
                num, first = int(counts[slot, head]), int(bounds[slot, head])
                pool[slot, first : first + num] = slab[slot, head, :num]
            return pool.view(slab.shape[0], num_heads, capacity, *slab.shape[3:])

        layer = attrs.evolve(
            case.layer,
            rows=mean[:, None].repeat(1, num_heads),
            keys=pooled(named["keys"], empty),
            values=pooled(named["values"], empty),
            positions=pooled(named["positions"], -1),
            tracks=[pooled(track, 0) for track in case.tracks],
            accumulated=[pooled(track, 0) for track in case.accumulated.values()],
            bounds=bounds,
        )
        return cls(case, layer)

    def unpack(self) -> None:
        """Write the rows of the pools into the slabs of the case."""
        case, bounds = self.case, self.layer.bounds
        pairs = [
            *((case.tensors[name], getattr(self.layer, name)) for name in ("keys", "values")),
            (case.tensors["positions"], self.layer.positions),
            *zip(case.tracks, self.layer.tracks, strict=True),
            *zip(case.accumulated.values(), self.layer.accumulated, strict=True),
        ]
        every = torch.cartesian_prod(*map(torch.arange, self.layer.rows.shape)).view(-1, 2)
        for slot, head in every:
            num = int(case.tensors["rows"][slot, head]) + int(case.tensors["live"][slot])
            first = int(bounds[slot, head])
            for slab, pool in pairs:
                slab[slot, head, :num] = pool[slot].flatten(0, 1)[first : first + num]


@attrs.define(eq=False)
class Expected:
    """What loops make of a case.

    Attributes:
        output: ``[W, H_q, D]``.
        tensors: Slabs, by name.
        tracks: Tracks that attention does not change.
        accumulated: Those that it does.
        largest: The largest logit.
    """

    output: Tensor
    tensors: dict[str, Tensor | None]
    tracks: list[Tensor]
    accumulated: dict[str, Tensor]
    largest: float = 0.0


def expected(case: Case) -> Expected:
    """Output, slabs and tracks that loops make of a case."""
    named = {
        name: None if one is None else one.detach().cpu().clone()
        for name, one in case.tensors.items()
    }
    tracks = [track.cpu().clone() for track in case.tracks]
    accumulated = {name: track.cpu().clone() for name, track in case.accumulated.items()}
    window = case.options["sliding_window"]
    capacity, dim = named["keys"].shape[2:]
    of_heads = (*named["query"].shape[:2], named["values"].shape[3])
    output = torch.zeros(of_heads, dtype=torch.float64)
    wanted = Expected(output, named, tracks, accumulated)
    for slot, head in torch.cartesian_prod(*map(torch.arange, named["rows"].shape)).view(-1, 2):
        if not named["live"][slot]:
            continue
        num, now = int(named["rows"][slot, head]), int(named["seq_len"][slot])
        slabs = [named["keys"], named["values"], *tracks, *accumulated.values()]
        if num == capacity and window == capacity:
            for slab, empty in [*((slab, 0) for slab in slabs), (named["positions"], -1)]:
                rows = list(slab[slot, head].clone())
                rows = reference.drop_first(rows, torch.full_like(rows[0], empty))
                slab[slot, head] = torch.stack(rows)
            num -= 1
        named["keys"][slot, head, num] = named["key"][slot, head]
        named["values"][slot, head, num] = named["value"][slot, head]
        named["positions"][slot, head, num] = now
        at = named["positions"][slot, head].tolist()
        seen = [row <= num and (not window or at[row] > now - window) for row in range(capacity)]
        keys, values = (named[name][slot, head].double().tolist() for name in ("keys", "values"))
        of_heads = []
        for q in range(int(head) * case.group, (int(head) + 1) * case.group):
            query = named["query"][slot, q]
            if named["window"] is not None:
                factor = case.options["scaling"] * dim**0.5
                same = abs(factor - 1) < 1e-6
                remembered = query if same else query * factor
                named["window"][slot, q, now % named["window"].shape[2]] = remembered
            sink = None if named["sinks"] is None else float(named["sinks"][q])
            result, *of_rows = reference.attention(
                query.double().tolist(),
                keys,
                values,
                seen,
                case.options["scaling"],
                case.options["softcap"],
                sink,
            )
            output[slot, q] = torch.tensor(result, dtype=torch.float64)
            of_heads.append(of_rows)
        for row in range(num + 1):
            weights, logits = ([one[part][row] for one in of_heads] for part in (0, 1))
            for name, track in accumulated.items():
                track[slot, head, row] = reference.accumulated(
                    name, float(track[slot, head, row]), weights, logits
                )
            wanted.largest = max([wanted.largest, *(abs(z) for z in logits if z is not None)])
    return wanted


def assert_as_expected(
    case: Case, output: Tensor, wanted: Expected, sums_tolerance: float = SUMS_TOLERANCE
) -> None:
    live = case.tensors["live"].cpu()
    assert output.isfinite().all()
    torch.testing.assert_close(
        output.cpu().double()[live], wanted.output[live], rtol=0, atol=TOLERANCE[case.dtype]
    )
    for name in ("keys", "values", "positions"):
        torch.testing.assert_close(
            case.tensors[name].cpu(), wanted.tensors[name], rtol=0, atol=0, equal_nan=True
        )
    if case.tensors["window"] is not None:
        torch.testing.assert_close(
            case.tensors["window"].cpu(),
            wanted.tensors["window"],
            rtol=WINDOW_TOLERANCE.get(case.dtype, 0),
            atol=0,
        )
    for track, wanted_track in zip(case.tracks, wanted.tracks, strict=True):
        torch.testing.assert_close(track.cpu(), wanted_track, rtol=0, atol=0)
    for name, track in case.accumulated.items():
        torch.testing.assert_close(
            track.cpu(),
            wanted.accumulated[name],
            rtol=0,
            atol=sums_tolerance * max(1, wanted.largest) ** POWERS.get(name, 0),
            msg=lambda text, name=name: f"{name}: {text}",
        )
