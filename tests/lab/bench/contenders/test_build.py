"""All contenders: forms of the weights, and what is compared with what."""

from bench_parts import cell, cells
from tiny import tiny_model

from kvpolicy.lab.bench.contenders.build import build_contenders
from kvpolicy.lab.bench.contenders.contender import (
    CONTINUOUS,
    FIRST_PLAN,
    FORWARD,
    FULL,
    GENERATE,
    LIMIT,
    LLAMA_CPP,
    MODEL_ALONE,
    OPENVINO,
    PRODUCTS_ALONE,
    VLLM,
)
from kvpolicy.lab.bench.contenders.form import PACKED, Form


def test_weights_in_another_form_are_contenders_of_their_own() -> None:
    model = tiny_model()
    forms = [Form.plain(model), Form(PACKED, model, model), Form("bf16", model, model)]
    found = build_contenders(forms, cells("knorm"), without=["kvpress"])
    names = [one.name for one in found.all]
    mine = [PRODUCTS_ALONE, MODEL_ALONE, GENERATE, FORWARD, CONTINUOUS, "knorm"]
    mine = [name for name in mine if name not in found.absent]
    others = [f"{name}, {form}" for form in (PACKED, "bf16") for name in mine]
    assert names == [LIMIT, *mine, *others]
    of_packed, rounded = (
        next(one.references for one in found.all if one.name == f"knorm, {form}")
        for form in (PACKED, "bf16")
    )
    assert of_packed == {
        GENERATE: "generate, packed",
        MODEL_ALONE: "model alone, packed",
        FORWARD: f"{FORWARD}, packed",
        VLLM: "vLLM",  # its weights have one form
        OPENVINO: "OpenVINO",
        LLAMA_CPP: "llama.cpp",
    }
    assert rounded[OPENVINO] == "OpenVINO, bf16"
    assert rounded[VLLM] == "vLLM"
    limited = {one.name: one.has_limit for one in found.all}
    assert limited["knorm"]
    assert limited["knorm, packed"]
    assert not limited["knorm, bf16"], "it reads half of the bytes that the limit is of"


def test_plans_are_compared_with_the_full_cache_and_as_many_of_the_newest_rows() -> None:
    packed = cell("rkv", rows="int8")
    given_cells = [*cells("full", "streaming", "knorm"), *cells("h2o", budget=12), packed]
    found = build_contenders([Form.plain(tiny_model())], given_cells, without=["kvpress"])
    references = {one.name: one.references for one in found.all}
    assert references["knorm"][FIRST_PLAN] == "streaming"
    assert references["knorm"][FULL] == references["h2o"][FULL] == "full"
    assert FIRST_PLAN not in references["streaming"], "it is the first"
    assert FIRST_PLAN not in references["h2o"], "no other keeps as many rows"
    assert FIRST_PLAN not in references["rkv"], "no other has rows in integers"
