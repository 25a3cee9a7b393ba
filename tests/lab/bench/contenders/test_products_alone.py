"""The products alone are every linear layer once, on a row of each sequence."""

from collections import Counter
from typing import Any

import pytest
from tiny import tiny_model
from torch import nn

from kvpolicy import packed_model
from kvpolicy.lab.bench.contenders.products_alone import products_alone
from kvpolicy.lab.bench.workload import Decode, Text
from kvpolicy.model.packed import PackedLinear, Product


@pytest.mark.usefixtures("packs_small_products")
def test_every_product_is_computed_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model(tiny_model())
    calls: Counter[int] = Counter()
    rows = set()
    multiply = Product._multiply

    def counting(self: Product, states: Any) -> Any:
        calls[id(self)] += 1
        rows.add(states.shape[:-1].numel())
        return multiply(self, states)

    monkeypatch.setattr(Product, "_multiply", counting)
    done = products_alone(model).run(Decode(3, 9, 5))
    products = {id(one.product) for one in model.modules() if isinstance(one, PackedLinear)}
    assert calls == dict.fromkeys(products, 5 + 2)
    assert rows == {3}
    assert (len(done.steps_s), done.kv_bytes, done.prefill_s) == (5, 0, None)


def test_plain_layers_are_computed_too() -> None:
    model, calls = tiny_model(), Counter[str]()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *_, name=name: calls.update([name]))
    done = products_alone(model).run(Text(2, 2, 4, 7))
    assert len(done.steps_s) == 7
    assert set(calls.values()) == {7 + 2}
    assert len(calls) == 15
