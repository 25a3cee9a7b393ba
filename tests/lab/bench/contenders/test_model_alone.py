"""The model alone is measured without a cache, as the engine runs its steps."""

from collections.abc import Callable

import torch
from tiny import tiny_model

from kvpolicy.lab.bench.contenders.model_alone import model_alone
from kvpolicy.lab.bench.workload import Decode, Text
from kvpolicy.model.fused.step import Output
from kvpolicy.model.graphs import Graph


def test_the_model_alone_has_no_cache() -> None:
    contender = model_alone(tiny_model())
    for work in (Decode(2, 9, 7), Text(2, 2, 4, 7)):
        done = contender.run(work)
        assert (done.kv_bytes, done.read_bytes, done.prefill_s) == (0, 0, None)
        assert len(done.steps_s) == 7
        assert (done.path, done.profile) == ("", None)


def test_its_steps_are_fused_and_replayed_from_a_graph_where_there_are_graphs() -> None:
    model = tiny_model()
    answers: list[torch.Tensor] = []

    def capture(run: Callable[[], Output]) -> Graph:
        def replay() -> None:
            answers.append(run()[0])

        return Graph(replay, run())

    work = Decode(2, 9, 5, profiled=3)
    done = model_alone(model, capture).run(work)
    assert done.path == "in a graph"
    assert done.profile is not None
    plain = model_alone(model).run(work)
    assert plain.profile is not None
    assert 0 < done.profile.launches < plain.profile.launches
    assert len(answers) == 5 + 2 + 3
    tokens = torch.tensor([prompt[:1] for prompt in work.prompts(model.config.vocab_size)])
    with torch.inference_mode():
        wanted = model(input_ids=tokens, use_cache=False).logits[:, -1]
    for found in answers:
        torch.testing.assert_close(found, wanted)


def test_a_model_that_cannot_be_captured_runs_as_it_is_and_says_why() -> None:
    def refuse(_: Callable[[], Output]) -> Graph:
        msg = "operation not permitted when stream is capturing"
        raise RuntimeError(msg)

    done = model_alone(tiny_model(), refuse).run(Decode(2, 9, 5))
    assert "not permitted when stream is capturing" in done.path
    assert len(done.steps_s) == 5
