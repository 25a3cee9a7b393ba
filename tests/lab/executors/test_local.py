"""One machine: models come one at a time, and every sample is by the model it says."""

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from lab_comparisons import prepared
from tiny import tiny_model, tiny_tokenizer

from kvpolicy.lab import models as models_module
from kvpolicy.lab.executors.local import Local
from kvpolicy.lab.models import ModelCache
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.runner import run


@pytest.mark.parametrize(
    "workers",
    [
        1,
        pytest.param(
            2, marks=pytest.mark.skipif(sys.platform != "linux", reason="forks its workers")
        ),
    ],
)
def test_models_are_loaded_one_after_the_other_and_each_serves_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    loaded: list[str] = []
    models: list[weakref.ref[Any]] = []

    def load(name: str, **_: object) -> tuple[Any, Any]:
        assert not any(one() is not None for one in models), "the one before is gone"
        model = tiny_model(seed=ord(name))
        loaded.append(name)
        models.append(weakref.ref(model))
        return model, tiny_tokenizer()

    monkeypatch.setattr(models_module, "load_model", load)
    texts = {}
    for names in ("ab", "b", "a"):
        comparison = prepared(models=tuple(names), max_new_tokens=20)
        loaded.clear()
        with Store(tmp_path / names, comparison.to_dict()) as store:
            list(run(comparison, store, Local(comparison, ModelCache(), workers, threads=1)))
            texts[names] = {key: one.text for key, one in store.samples.items()}
        assert loaded == list(names)
    assert texts["ab"] == texts["a"] | texts["b"]
    assert set(texts["a"].values()) != set(texts["b"].values())


def test_a_shelf_gives_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(name: str, **_: object) -> tuple[Any, Any]:
        loaded.append(name)
        return name, None

    monkeypatch.setattr(models_module, "load_model", load)
    shelf = ModelCache()
    assert [shelf.open(name)[0] for name in "aabba"] == list("aabba")
    assert loaded == ["a", "b", "a"]
