"""A sequence that is cut and resumed goes on, bit for bit, as if it had never been cut."""

import json
import os
import re
import struct
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from batches import generated_tokens
from families import family_model
from fresh_process import run_fresh
from hypothesis import given
from hypothesis import strategies as st
from recorder import RecordsAndSteers
from safetensors.torch import load_file, save_file
from strategies import costly, plans, prompts
from tiny import shared_model, tiny_tokenizer
from torch import nn

from kvpolicy import Engine, Plan, PolicyCache, Request, Sampling, hookimpl
from kvpolicy.engine.snapshots.snapshot import FORMAT, SequenceSnapshot
from kvpolicy.errors import CacheError, PolicyLoadError, SnapshotError
from kvpolicy.state import Memory

NUM_LAYERS = 2
TIGHT = Plan.uniform("h2o", budget=12, buffer=4)
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss")  # windows, soft caps, sinks

# In double precision the order of additions does not matter.
models = st.builds(family_model, st.sampled_from(FAMILIES), dtype=st.just(torch.float64))


def llama(**options: Any) -> Any:
    return shared_model(num_layers=NUM_LAYERS, dtype=torch.float64, **options)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return Request(
        draw(prompts(count=1, max_len=30))[0],
        draw(st.integers(1, 40)),
        Sampling(draw(st.sampled_from([0, 1.5])), seed=draw(st.integers(0, 9))),
        draw(st.sampled_from([(), ("ab", "c")])),
        draw(st.sampled_from([(), (4, 5)])),
        snapshot=draw(st.booleans()),
    )


def through_file(snapshot: SequenceSnapshot) -> SequenceSnapshot:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sequence.safetensors"
        snapshot.save(path)
        return SequenceSnapshot.load(path)


def assert_same(ours: SequenceSnapshot | None, theirs: SequenceSnapshot | None) -> None:
    """The same tokens, rows, tracks and queries."""
    assert ours is not None
    assert theirs is not None
    assert ours.token_ids == theirs.token_ids
    assert (ours.num_observed, ours.registers) == (theirs.num_observed, theirs.registers)
    for own, other in zip(ours.contents.layers, theirs.contents.layers, strict=True):
        assert own.compacted_at == other.compacted_at
        assert torch.equal(own.positions, other.positions)
        for mine, yours in zip(own.tensors, other.tensors, strict=True):
            torch.testing.assert_close(mine, yours)


@costly
@given(
    models,
    plans(num_layers=NUM_LAYERS),
    requests(),
    st.lists(requests(), max_size=3),
    st.lists(requests(), max_size=3),
    st.data(),
)
def test_a_sequence_that_was_cut_goes_on_as_if_it_had_not_been(
    model: nn.Module,
    plan: Plan,
    request: Request,
    before: list[Request],
    after: list[Request],
    data: st.DataObject,
) -> None:
    options = {"slots": 3, "steps_per_read": data.draw(st.sampled_from([1, 2]))}
    engine = Engine(model, tiny_tokenizer(), plan, **options)
    request = attrs.evolve(request, snapshot=True)
    whole = engine.generate([request]).results()[0]

    run, snapshot = engine.generate([*before, request]), None
    cut_at = data.draw(st.integers(0, 60))
    while not run.done:
        run.step()
        served = [seq for seq in run.active if seq.id == len(before)]
        if served and len(served[0].tokens) >= min(cut_at, len(whole.tokens) - 1):
            snapshot = run.snapshot(len(before))
            break
    if snapshot is None:
        return  # it has ended with its first token, or within one read
    num = len(snapshot.tokens)
    assert snapshot.tokens == whole.tokens[:num]
    if data.draw(st.booleans(), label="in another engine"):
        engine = Engine(model, tiny_tokenizer(), plan, eager=data.draw(st.booleans()), **options)
    if data.draw(st.booleans(), label="through a file"):
        snapshot = through_file(snapshot)
    rest = attrs.evolve(
        request, prompt=(), max_new_tokens=request.max_new_tokens - num, resume=snapshot
    )
    places = [data.draw(st.integers(0, len(after))) for _ in range(2)]
    others = [*after]
    for place in places:
        others.insert(place, rest)
    results = engine.generate(others).results()
    resumed = [one for one, asked in zip(results, others, strict=True) if asked is rest]
    assert len(resumed) == 2
    for one in resumed:
        assert one.error is None
        assert (*snapshot.tokens, *one.tokens) == whole.tokens
        assert one.finish_reason == whole.finish_reason
        assert_same(one.snapshot, whole.snapshot)


@costly
@given(
    models,
    plans(num_layers=NUM_LAYERS),
    prompts(count=2, max_len=30),
    prompts(count=2, max_len=20),
    st.booleans(),
)
def test_another_turn_is_that_of_a_conversation(
    model: nn.Module,
    plan: Plan,
    start: list[list[int]],
    more: list[list[int]],
    on_disk: bool,
) -> None:
    """In a `PolicyCache`, with its prompt_len, and what was due at the end of the first turn."""
    cache = PolicyCache(model, plan, tiny_tokenizer())
    first = generated_tokens(model, start[:1], 9, past_key_values=cache)
    text = [start[0] + first[0] + more[0]]
    second = generated_tokens(model, text, 12, past_key_values=cache)

    engine = Engine(model, tiny_tokenizer(), plan)
    asked = [Request(one, 9, stop_ids=(), snapshot=True) for one in start]
    results = engine.generate(asked).results()
    assert list(results[0].tokens) == first[0]
    turns = []
    for result, new in zip(results, more, strict=True):
        assert result.snapshot is not None
        snapshot = result.snapshot
        if on_disk:
            snapshot = through_file(snapshot)
        turns.append(Request(new, 12, stop_ids=(), resume=snapshot))
    answers = engine.generate(turns).results()
    assert list(answers[0].tokens) == second[0]
    assert [one.prompt_len for one in answers] == [len(new) for new in more]


@pytest.mark.slow
@costly
@given(models, plans(num_layers=NUM_LAYERS), prompts(count=2, max_len=30))
def test_caches_are_restored_from_snapshots_of_engines_and_caches(
    model: nn.Module, plan: Plan, start: list[list[int]]
) -> None:
    tokenizer = tiny_tokenizer()
    engine = Engine(model, tokenizer, plan)
    results = engine.generate([Request(one, 9, stop_ids=(), snapshot=True) for one in start])
    snapshots = [result.snapshot for result in results.results()]
    restored = PolicyCache(model, plan, tokenizer)
    restored.restore(snapshots)
    cache = PolicyCache(model, plan, tokenizer)
    answers = generated_tokens(model, start, 9, past_key_values=cache)
    assert restored.report.tokens == cache.report.tokens
    again = PolicyCache(model, plan, tokenizer)
    again.restore([cache.snapshot(1), cache.snapshot(0), cache.snapshot(1)])
    text = [row + answer + [7, 8] for row, answer in zip(start, answers, strict=True)]
    expected = generated_tokens(model, text, 12, past_key_values=cache)
    assert generated_tokens(model, text, 12, past_key_values=restored) == expected
    order = [1, 0, 1]
    ours = generated_tokens(model, [text[row] for row in order], 12, past_key_values=again)
    assert ours == [expected[row] for row in order]


@pytest.mark.parametrize("prompt", [(), (7, 8)])
def test_a_slab_that_the_last_step_has_filled_is_compacted_when_it_goes_on(
    prompt: tuple[int, ...],
) -> None:
    model, start, num = llama(), list(range(14)), 3  # its second step fills the slab
    engine = Engine(model, plan=TIGHT)
    request = Request(start, num, stop_ids=(), snapshot=True)
    (first,) = engine.generate([request]).results()
    assert first.snapshot is not None
    assert {layer.num_rows for layer in first.snapshot.contents.layers} == {16}
    rest = Request(prompt, 20, stop_ids=(), resume=first.snapshot)
    (result,) = engine.generate([rest]).results()
    if prompt:
        cache = PolicyCache(model, TIGHT)
        generated_tokens(model, [start], num, past_key_values=cache)
        text = [[*start, *first.tokens, *prompt]]
        expected = generated_tokens(model, text, 20, past_key_values=cache)[0]
    else:
        whole = engine.generate([start], max_new_tokens=num + 20, stop_ids=()).results()[0]
        expected = list(whole.tokens[num:])
    assert list(result.tokens) == expected


@pytest.mark.few(3)
@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_a_cache_goes_on_from_within_a_prompt(name: str, num_steps: int) -> None:
    """The last cut leaves one token of the prompt."""
    prompt, plan = [(7 * i) % 60 for i in range(25)], Plan.uniform(name, budget=10, buffer=4)
    engine = Engine(llama(), plan=plan, chunk=8)
    run = engine.generate([Request(prompt, 12, stop_ids=())])
    for _ in range(num_steps):
        run.step()
    snapshot = run.snapshot(0)
    assert 0 < snapshot.seq_len < len(prompt)
    (whole,) = run.results()
    cache = PolicyCache(llama(), plan, chunk=8)
    cache.restore([snapshot])
    assert generated_tokens(llama(), [prompt], 12, past_key_values=cache) == [list(whole.tokens)]


def test_a_sequence_that_has_seen_nothing_has_no_snapshot() -> None:
    """It has a slot, and waits until the prompt before its own is in."""
    run = Engine(llama(), plan=TIGHT, max_tokens_per_forward=8).generate([[1] * 20, [2] * 20])
    run.step()
    assert run.snapshot(0).seq_len == 8
    with pytest.raises(SnapshotError, match="request 1 has not begun"):
        run.snapshot(1)


def taken(plan: Plan = TIGHT, **options: Any) -> SequenceSnapshot:
    """Of a sequence of 20 and 30 tokens at its end."""
    engine = Engine(llama(), tiny_tokenizer(), plan, **options)
    request = Request(range(20), 30, stop_ids=(), snapshot=True)
    (result,) = engine.generate([request]).results()
    assert result.snapshot is not None, result.error
    return result.snapshot


def test_a_snapshot_holds_the_rows_that_are_held_and_no_slab() -> None:
    engine = Engine(llama(), plan=Plan.uniform("streaming", budget=12, buffer=30))
    run = engine.generate([Request(range(20), 30, stop_ids=())])
    for _ in range(25):
        run.step()
    snapshot, cache = run.snapshot(0), run.cache
    rows = cache.rows[:, 0]
    assert (rows < cache.capacity).all()
    of_positions = 8 * 2 * int(rows.sum())  # in 2 heads
    assert snapshot.num_bytes == int(rows @ cache.row_bytes) + of_positions
    sizes = f"tokens={len(snapshot.token_ids)}, rows={rows[0]}, num_bytes={snapshot.num_bytes}"
    assert repr(snapshot) == f"SequenceSnapshot({sizes})"


def test_a_snapshot_does_not_change_with_its_sequence() -> None:
    engine = Engine(llama(), plan=TIGHT)
    run = engine.generate([Request(range(20), 20, stop_ids=())])
    run.step()
    snapshot = run.snapshot(0)
    before = [tensor.clone() for tensor in snapshot.contents.tensors]
    run.results()
    engine.generate([Request(resume=snapshot, max_new_tokens=12)] * 3).results()
    assert all(map(torch.equal, before, snapshot.contents.tensors))


def test_memory_and_registers_go_on() -> None:
    plan = Plan.uniform("streaming", RecordsAndSteers(), budget=12, buffer=5)
    engine = Engine(llama(), tiny_tokenizer(), plan)
    request = Request(range(20), 26, stop_ids=())
    (whole,) = engine.generate([request]).results()
    run = engine.generate([request])
    for _ in range(17):
        run.step()
    snapshot = run.snapshot(0)
    rest = Request(resume=snapshot, max_new_tokens=26 - len(snapshot.tokens), stop_ids=())
    for result in engine.generate([rest, rest]).results():
        assert (*snapshot.tokens, *result.tokens) == whole.tokens


@pytest.mark.nightly
def test_skipkv_goes_on_in_another_process(tmp_path: Path) -> None:
    """Its sentences and penalties are written, and found again by another process."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "support")!r})
import torch
from tiny import shared_model, tiny_tokenizer
from kvpolicy import Engine, Plan, Request
from kvpolicy.engine.snapshots.snapshot import FORMAT, SequenceSnapshot
model = shared_model(num_layers=2, dtype=torch.float64)
knobs = {{"skipkv": {{"tau": 0.2, "window_size": 4}}}}
plan = Plan.uniform("skipkv", budget=14, buffer=5, knobs=knobs)
engine = Engine(model, tiny_tokenizer(), plan)
snapshot = SequenceSnapshot.load({str(tmp_path / "a.safetensors")!r})
(result,) = engine.generate([Request(resume=snapshot, max_new_tokens=60, stop_ids=())]).results()
print(result.error or list(result.tokens))
"""
    knobs = {"skipkv": {"tau": 0.2, "window_size": 4}}
    plan = Plan.uniform("skipkv", budget=14, buffer=5, knobs=knobs)
    engine = Engine(llama(), tiny_tokenizer(), plan)
    request = Request("it is. so it is.\n\nit is. so\n", 60, stop_ids=())
    (whole,) = engine.generate([request]).results()
    run = engine.generate([request])
    for _ in range(14):
        run.step()
    snapshot = run.snapshot(0)
    assert 5 < (taken := len(snapshot.tokens)) < 45
    snapshot.save(tmp_path / "a.safetensors")
    done = run_fresh(program, folder=tmp_path)
    assert json.loads(done.out)[: 60 - taken] == list(whole.tokens[taken:]), done.err


def stop_within(
    tokens: tuple[int, ...], size: int = 3, least: int | None = None
) -> tuple[str, int]:
    """A text of some tokens that comes nowhere before, and the number of tokens before it."""
    tokenizer = tiny_tokenizer()
    for begin in range(len(tokens) // 2 if least is None else least, len(tokens)):
        stop = tokenizer.decode(tokens[begin : begin + size])
        if tokenizer.decode(tokens).index(stop) == len(tokenizer.decode(tokens[:begin])):
            return stop, begin
    raise AssertionError


def test_stop_strings_are_found_across_the_cut_and_not_before_it() -> None:
    engine = Engine(llama(), tiny_tokenizer(), TIGHT)
    request = Request(range(9), 30, stop_ids=())
    (whole,) = engine.generate([request]).results()
    stop, begin = stop_within(whole.tokens)
    (stopped,) = engine.generate([attrs.evolve(request, stop=stop)]).results()
    assert len(stopped.tokens) == begin + 3
    run = engine.generate([request])

    def resumed_at(num: int) -> tuple[SequenceSnapshot, Request]:
        while not run.active or len(run.active[0].tokens) < num:
            run.step()
        snapshot = run.snapshot(0)
        return snapshot, Request(resume=snapshot, max_new_tokens=2, stop=stop, stop_ids=())

    snapshot, rest = resumed_at(begin + 2)
    (result,) = engine.generate([rest]).results()
    assert (result.finish_reason, result.text) == ("stop", "")
    assert (*snapshot.tokens, *result.tokens) == stopped.tokens
    _, rest = resumed_at(begin + 3)
    assert engine.generate([rest]).results()[0].finish_reason == "length"


def test_ends_with_stop_strings_are_exact_whatever_is_read_together() -> None:
    request = Request(range(20), 60, stop_ids=(), snapshot=True)
    one, eight = (
        Engine(llama(), tiny_tokenizer(), TIGHT, steps_per_read=steps) for steps in (1, 2)
    )
    (whole,) = one.generate([request]).results()
    for least in (9, 12):
        stopping = attrs.evolve(request, stop=stop_within(whole.tokens, 1, least)[0])
        (expected,), (end,) = (engine.generate([stopping]).results() for engine in (one, eight))
        assert expected.finish_reason == "stop"
        assert_same(end.snapshot, expected.snapshot)


# What is refused


def error_of(engine: Engine, **options: Any) -> str:
    (result,) = engine.generate([Request(**options)]).results()
    assert result.finish_reason == "error"
    assert result.error is not None
    return result.error


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda: Engine(llama(), plan=Plan.uniform("h2o", budget=13, buffer=4)), "budget"),
        (lambda: Engine(llama(), plan=Plan.uniform("tova", budget=12, buffer=4)), "every"),
        (
            lambda: Engine(shared_model(num_layers=NUM_LAYERS), plan=TIGHT),
            "float64.*float32",
        ),
        (lambda: Engine(llama(num_kv_heads=4), plan=TIGHT), "num_kv_heads"),
    ],
)
def test_snapshots_of_other_plans_and_models_are_refused(
    other: Callable[[], Engine], difference: str
) -> None:
    snapshot, engine = taken(), other()
    error = error_of(engine, resume=snapshot, max_new_tokens=3)
    pattern = rf"^[^\n]*{difference}[^\n]*$"

    assert re.search(pattern, error), error
    cache = PolicyCache(engine.adapter.model, engine.plan)
    with pytest.raises(CacheError, match=difference):
        cache.restore([snapshot])


def test_requests_that_cannot_go_on_are_refused() -> None:
    engine = Engine(llama(), tiny_tokenizer(), TIGHT)
    cache = PolicyCache(llama(), TIGHT, tiny_tokenizer())
    generated_tokens(llama(), [[1, 2, 3]], 4, past_key_values=cache)
    assert "snapshot" in error_of(engine, resume=cache.snapshot(0))
    assert "550" in error_of(engine, prompt=[1] * 500, resume=taken())
    run = engine.generate([Request([1, 2], 3, stop_ids=()) for _ in range(9)])
    run.step()
    with pytest.raises(SnapshotError, match="8"):
        run.snapshot(8)
    with pytest.raises(SnapshotError, match="99"):
        run.snapshot(99)
    with pytest.raises(CacheError, match="row 3"):
        cache.snapshot(3)


def test_plans_that_store_pads_have_no_snapshots() -> None:
    plan = attrs.evolve(TIGHT, padding="stored")
    assert "pads belong to a group" in error_of(
        Engine(llama(), plan=plan), prompt=[1, 2], snapshot=True
    )


@cache
def content() -> bytes:
    """A file of a snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        taken().save(path)
        return path.read_bytes()


def saved(folder: Path) -> Path:
    path = folder / "a.safetensors"
    path.write_bytes(content())
    return path


def change_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """As another program would write it, with a checksum that fits."""
    tensors, header = FORMAT.read(path)
    change(header)
    path.write_bytes(FORMAT.to_bytes(tensors, header))


def of_version(number: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(
        attrs.evolve(FORMAT, version=number).to_bytes(*FORMAT.read(path))
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "regular file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "safetensors"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "safetensors"),
        (lambda path: path.write_text("{}"), "safetensors"),
        (lambda path: save_file(load_file(path), path), "snapshot of a sequence"),
        (of_version(1), "version 1"),
        (
            lambda path: change_header(path, lambda header: header.pop("tokens")),
            "'tokens'",
        ),
        (
            lambda path: change_header(path, lambda header: header.update(seq_len=3)),
            "50 tokens",
        ),
        (
            lambda path: change_header(path, lambda header: header["prompt"].__setitem__(0, 999)),
            "vocabulary",
        ),
        (
            lambda path: change_header(
                path, lambda header: header["identity"]["model"]["layers"][0].update(head_dim=4)
            ),
            "keys of layer 0",
        ),
        (
            lambda path: change_header(path, lambda header: header.update(num_observed=77)),
            "more tokens",
        ),
    ],
)
def test_files_that_are_no_snapshots_are_refused_in_one_sentence(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    path = saved(tmp_path)
    damage(path)
    with pytest.raises(SnapshotError, match=message) as caught:
        SequenceSnapshot.load(path)
    assert "\n" not in str(caught.value)


bits = st.tuples(st.booleans(), st.floats(0, 1, exclude_max=True), st.integers(0, 7))


@given(st.lists(bits, min_size=8, max_size=8))
def test_a_snapshot_with_one_bit_changed_is_refused(
    tmp_path_factory: pytest.TempPathFactory, changed: list[tuple[bool, float, int]]
) -> None:
    """In its header and anywhere: rows, tokens, registers, costs, names, the checksum."""
    path = saved(tmp_path_factory.mktemp("bits"))
    content = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", content[:8])
    for in_header, place, bit in changed:
        wrong = bytearray(content)
        wrong[int(place * (8 + header_bytes if in_header else len(wrong)))] ^= 1 << bit
        path.write_bytes(wrong)
        with pytest.raises(SnapshotError, match=path.name):
            SequenceSnapshot.load(path)


@pytest.mark.skipif(os.name == "nt", reason="needs modes")
def test_a_snapshot_is_for_this_user_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = tmp_path / "a.safetensors"
        taken().save(path)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600


def test_rows_out_of_order_are_noticed(tmp_path: Path) -> None:
    snapshot = taken()
    snapshot.contents.layers[1].positions[0].copy_(snapshot.contents.layers[1].positions[0].flip(0))
    snapshot.save(tmp_path / "a.safetensors")
    with pytest.raises(SnapshotError, match="positions of layer 1"):
        SequenceSnapshot.load(tmp_path / "a.safetensors")


# What policies remember


@attrs.define(eq=False)
class Remembers:
    """Remembers something of each kind, and scores by it."""

    @hookimpl
    def score(self, layer_idx: int, positions: torch.Tensor, memory: Memory) -> torch.Tensor:
        for own in memory.of(self):
            own["seen"] = own.get("seen", 0) + 1
            own.setdefault("all", []).append(
                {1: (2, 3.5), "none": None, b"\x00": {4, "a"}, (1, 2): frozenset([True])}
            )
            own["inf"] = [float("inf"), -0.0, 2**70]
            own["tensor"] = torch.full((2, 3), float(own["seen"]), dtype=torch.bfloat16)[:, ::2]
        counts = torch.tensor([own["seen"] for own in memory.of(self)])
        return (positions * (counts[:, None, None] + 3)).float() % 7


def test_plain_memory_is_written_as_it_is() -> None:
    plan = Plan.uniform(Remembers(), budget=12, buffer=4)
    snapshot = taken(plan)
    again = through_file(snapshot)
    assert list(again.memory) == [0]
    ours, theirs = dict(again.memory[0]), dict(snapshot.memory[0])
    assert torch.equal(ours.pop("tensor"), theirs.pop("tensor"))
    assert ours == theirs
    assert again.num_bytes == snapshot.num_bytes
    assert again.num_bytes > sum(tensor.nbytes for tensor in again.contents.tensors)


@attrs.define(eq=False)
class RemembersALock:
    @hookimpl
    def score(self, positions: torch.Tensor, memory: Memory) -> torch.Tensor:
        for own in memory.of(self):
            own["lock"] = threading.Lock()
        return positions.float()


@attrs.define
class Note:
    number: int = 0


@attrs.define(eq=False)
class RemembersAnObject:
    @hookimpl
    def score(self, positions: torch.Tensor, memory: Memory) -> torch.Tensor:
        for own in memory.of(self):
            own.setdefault("note", Note()).number += 1
        counts = torch.tensor([own["note"].number for own in memory.of(self)])
        return (positions * (counts[:, None, None] + 3)).float() % 7


@attrs.define(eq=False)
class PacksAnObject(RemembersAnObject):
    def pack_memory(self, memory: dict[str, Any]) -> dict[str, Any]:
        return {"number": memory["note"].number} if memory else {}

    def unpack_memory(self, packed: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        return {"note": Note(packed["number"])} if packed else {}


def test_memory_that_cannot_be_copied_or_written_is_named(tmp_path: Path) -> None:
    def engine(policy: object) -> Engine:
        return Engine(llama(), plan=Plan.uniform(policy, budget=12, buffer=4))

    asked = {"prompt": range(20), "max_new_tokens": 30, "stop_ids": (), "snapshot": True}
    error = error_of(engine(RemembersALock()), **asked)
    assert error.startswith("the memory of RemembersALock cannot be copied: TypeError")
    snapshot = taken(Plan.uniform(RemembersAnObject(), budget=12, buffer=4))
    with pytest.raises(SnapshotError, match=r"RemembersAnObject.*Note"):
        snapshot.save(tmp_path / "a.safetensors")


@pytest.mark.parametrize("policy", [RemembersAnObject, PacksAnObject])
def test_objects_in_memory_are_copied(policy: type) -> None:
    engine = Engine(llama(), plan=Plan.uniform(policy(), budget=12, buffer=4))
    request = Request(range(20), 36, stop_ids=())
    (whole,) = engine.generate([request]).results()
    run = engine.generate([request])
    for _ in range(20):
        run.step()
    snapshot = run.snapshot(0)
    run.results()
    if policy is PacksAnObject:
        snapshot = through_file(snapshot)
    num = len(snapshot.tokens)
    rest = Request(resume=snapshot, max_new_tokens=36 - num, stop_ids=())
    for result in engine.generate([rest, rest]).results():
        assert result.tokens == whole.tokens[num:]


def test_one_method_of_two_is_refused() -> None:
    @attrs.define(eq=False)
    class PacksOnly(Remembers):
        def pack_memory(self, memory: dict[str, Any]) -> dict[str, Any]:
            return memory

    with pytest.raises(PolicyLoadError, match="unpack_memory"):
        Engine(llama(), plan=Plan.uniform(PacksOnly(), budget=12, buffer=4))
