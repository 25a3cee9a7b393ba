"""A feature is a file: without it, plans that do not use it run, and others get one sentence."""

import shutil
from pathlib import Path

import pytest
from fresh_process import run_fresh

import kvpolicy
from kvpolicy.compat import has_states

PACKAGE = Path(kvpolicy.__file__).parent

# Runs in a copy of the package: a plan without the feature, then one with it.
PROGRAM = """
import sys
copy, case = sys.argv[1:]
sys.path.insert(0, copy)
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
import kvpolicy
assert kvpolicy.__file__.startswith(copy), kvpolicy.__file__
from kvpolicy import Engine, KVPolicyError, Lookahead, Plan, PolicyCache, PrefixStore, Request
from kvpolicy import hookimpl
from kvpolicy.compat import cache_argument

sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=2, vocab_size=50)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()


class Marks:
    tracks = ("a",)
    @hookimpl
    def annotate(self, keys):
        return {"a": torch.zeros(keys.shape[:2])}


class Observes:
    @hookimpl
    def observe(self, start):
        return None


class Lookaheads:
    lookahead_size = 1
    @hookimpl
    def lookahead(self):
        return Lookahead(num_greedy=1)


class Steers:
    @hookimpl
    def steer(self, hidden_states):
        return torch.zeros_like(hidden_states)


def plan(*stack, **options):
    return Plan.uniform(*stack, budget=8, buffer=4, **options)


def answered(plan, request=Request([1, 2, 3], 20, stop_ids=()), model=model, **options):
    (result,) = Engine(model, plan=plan, **options).generate([request]).results()
    if result.error:
        raise KVPolicyError(result.error)
    return result.tokens


def windowed():
    config = MistralConfig(**sizes, sliding_window=4)
    return answered(plan("streaming"), model=MistralForCausalLM(config).eval())


def hybrid():
    from transformers import Lfm2Config, Lfm2ForCausalLM
    layers = dict(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    config = Lfm2Config(**sizes | layers, conv_L_cache=3)
    return answered(plan("streaming"), model=Lfm2ForCausalLM(config).eval())


def seeing():
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration
    parts = dict(vision_config=CLIPVisionConfig(**{k: v for k, v in sizes.items() if "_k" not in k},
                                                image_size=8, patch_size=4),
                 text_config=LlamaConfig(**sizes), image_token_index=9)
    model = LlavaForConditionalGeneration(LlavaConfig(**parts)).eval()
    prompt, image = torch.tensor([[1, 9, 9, 9, 9, 2]]), torch.zeros(1, 3, 8, 8)
    for given in ({}, {"pixel_values": image}):
        cache = cache_argument(PolicyCache(model, plan("streaming")))
        model.generate(prompt, **given, **cache, max_new_tokens=2, do_sample=False)


WITH = {
    "embedded": seeing,
    "annotate": lambda: answered(plan("streaming", Marks())),
    "observe": lambda: answered(plan("streaming", Observes())),
    "lookahead": lambda: answered(plan("streaming", Lookaheads())),
    "steer": lambda: answered(plan("streaming", Steers())),
    "logprobs": lambda: answered(plan("streaming"), Request([1, 2], 3, logprobs=1)),
    "snapshots": lambda: answered(plan("streaming"), Request([1, 2], 3, snapshot=True)),
    "prefix_reuse": lambda: answered(plan("streaming"), prefix_store=PrefixStore(1000)),
    "stored_pads": lambda: answered(plan("streaming", padding="stored")),
    "ragged": lambda: answered(plan("adakv", "h2o", heads="shared")),
    "prompt_kept": lambda: answered(plan("streaming", prompt="keep")),
    "window": windowed,
    "states": hybrid,
    "no_rows": hybrid,
    "integer_rows": lambda: answered(plan("streaming", rows="int8")),
    "exact_rows": lambda: answered(plan("streaming", rows="int4")),
    "staged": lambda: answered(plan("streaming", prefill_buffer=16), Request([1] * 15, 2)),
}
print(len(answered(plan("h2o"))))
try:
    WITH[case]()
except KVPolicyError as error:
    print(error)
"""

EXTENSIONS = sorted(
    f"engine/extensions/{file.name}"
    for file in (PACKAGE / "engine/extensions").glob("*.py")
    if file.stem not in ("__init__", "base")
)
LAYOUTS = [f"cache/layouts/{name}.py" for name in ("prompt_kept", "ragged", "staged", "window")]
LAYOUTS += [f"cache/layouts/{name}.py" for name in ("states", "no_rows") if has_states()]
ROWS = ["cache/integer_rows.py", "cache/exact_rows.py"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    leave_out = shutil.ignore_patterns("__pycache__", "lab", "serve")
    shutil.copytree(PACKAGE, folder / "kvpolicy", ignore=leave_out)
    return folder


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("file", [*EXTENSIONS, *LAYOUTS, *ROWS])
def test_a_feature_is_one_file(file: str, copy: Path, tmp_path: Path) -> None:
    path, aside = copy / "kvpolicy" / file, tmp_path / "aside"
    shutil.move(path, aside)
    try:
        ended = run_fresh(PROGRAM, copy, path.stem, folder=tmp_path)
    finally:
        shutil.move(aside, path)
    assert ended.status == 0, ended.err
    num_tokens, *sentences = ended.out.splitlines()
    assert int(num_tokens) == 20, "a plan without it answers"
    assert len(sentences) == 1, "a plan with it is refused in one sentence"
    assert f"{file.removesuffix('.py').replace('/', '.')}" in sentences[0]
