"""`kvpolicy trimkv`: gates are trained, shown and used; a run that was stopped goes on."""

import signal
from pathlib import Path

import pytest
from kvpolicy_plugins.trimkv.training import StepRecord, Trainer
from safetensors.torch import load_file
from shell import Shell, refusal

pytestmark = pytest.mark.needs_reasoner

TINY = ("--n", 6, "--batch", 1, "--max-tokens", 40, "--size", 4, "--steps", 4, "--memory", 8)


def test_what_is_trained_can_be_shown_and_used(kvpolicy: Shell, tmp_path: Path) -> None:
    file = tmp_path / "gates.safetensors"
    made = kvpolicy("trimkv", "train", "--output", file, *TINY, "--json")
    assert made.status == 0, made.err
    assert made.json["gates"]["layers"] == 4
    assert made.json["training"]["recipe"]["steps"] == 4
    assert made.json["training"]["num_texts"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gates.safetensors"]
    shown = kvpolicy("trimkv", "show", file, "--json")
    assert shown.json == made.json
    run = kvpolicy(
        "run", "1+1=" * 20, "--policy", "trimkv", "--budget", 16, "--max-new-tokens", 20,
        "--set", f"trimkv.gates={file}",
    )  # fmt: skip
    assert run.status == 0, run.err


def signals(monkeypatch: pytest.MonkeyPatch, *, at: int, numbers: tuple[int, ...]) -> None:
    """Sends signals to this process in the middle of one step of a training."""
    step = Trainer._step

    def signalled(self: Trainer) -> StepRecord:
        if self.done + 1 == at:
            for number in numbers:
                signal.raise_signal(number)
        return step(self)

    monkeypatch.setattr(Trainer, "_step", signalled)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_under_way_and_the_same_command_ends_alike(
    kvpolicy: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    whole, stopped = tmp_path / "whole.safetensors", tmp_path / "stopped.safetensors"
    assert kvpolicy("trimkv", "train", "--output", whole, *TINY).status == 0
    words = ("trimkv", "train", "--output", stopped, *TINY)
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        signals(patch, at=3, numbers=(number,))
        answer = kvpolicy(*words)
    assert handlers == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    assert answer.status == 130
    assert "step 3" in answer.err
    assert not stopped.exists()
    other = kvpolicy(*words, "--lr", 0.01)
    assert "lr was 0.003" in refusal(other)
    again = kvpolicy(*words)
    assert again.status == 0, again.err
    assert "going on after step 3" in again.err
    expected, found = load_file(whole), load_file(stopped)
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_a_second_ctrl_c_ends_the_step_and_keeps_what_is_saved(
    kvpolicy: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals(monkeypatch, at=4, numbers=(signal.SIGINT, signal.SIGINT))
    words = ("trimkv", "train", "--output", tmp_path / "gates.safetensors", *TINY)
    early = kvpolicy(*words, "--save-every", 4)
    assert early.status == 130
    assert list(tmp_path.iterdir()) == []
    late = kvpolicy(*words, "--save-every", 2)
    assert late.status == 130
    assert "step 2" in late.err


def test_a_signal_in_the_last_step_ends_nothing(
    kvpolicy: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals(monkeypatch, at=4, numbers=(signal.SIGTERM,))
    gates = tmp_path / "gates.safetensors"
    assert kvpolicy("trimkv", "train", "--output", gates, *TINY).status == 0
    assert [path.name for path in tmp_path.iterdir()] == [gates.name]


def test_gates_learn_from_a_file_of_texts(kvpolicy: Shell, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("tin is 9. wood is 8.\n\nfig is 7. What is fig?\n")
    file = tmp_path / "gates.safetensors"
    made = kvpolicy("trimkv", "train", "--output", file, "--texts", texts, *TINY, "--json")
    assert made.status == 0, made.err
    assert made.json["training"]["num_texts"] == 2
    assert made.json["training"]["texts"] == str(texts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output", "gates.pt"), "does not end in .safetensors"),
        (("--gate", "rg10"), "--gate got 'rg10'; choose rg or rg2 or rg3"),
        (("--task", "reasonr"), "reasonr"),
        (("--texts", "nowhere.txt"), "nowhere.txt"),
        (("--task", "perplexity"), "tokenizer of this model knows"),
        (("--memory", "0"), "memory"),
    ],
)
def test_wrong_input_is_answered_in_one_sentence(
    kvpolicy: Shell,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
) -> None:
    output = () if "--output" in words else ("--output", tmp_path / "gates.safetensors")
    answer = kvpolicy("trimkv", "train", *output, *TINY[:-2], *words)
    assert message in refusal(answer)


def test_gates_of_another_size_are_refused_by_a_run(
    kvpolicy: Shell,
    tmp_path: Path,
) -> None:
    from trimkv_gates import echo_gate

    file = echo_gate(tmp_path / "echo.safetensors", 2)
    answer = kvpolicy(
        "run", "1+1=", "--policy", "trimkv", "--budget", 16, "--set", f"trimkv.gates={file}"
    )
    assert answer.status != 0
    assert "kvpolicy trimkv train" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("name", ["reasoner", "reasoner-verbose"])
def test_shipped_gates_say_how_they_were_trained(kvpolicy: Shell, name: str) -> None:
    training = kvpolicy("trimkv", "show", name, "--json").json["training"]
    assert training["model"] == name
    assert training["texts"] == f"{name}, split train"
    shown = kvpolicy("trimkv", "show", name)
    assert f"model {name} {training['fingerprint']}" in shown.words
