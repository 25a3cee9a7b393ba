"""Models that are refused."""

import json
from collections.abc import Callable
from pathlib import Path

from families import model_of
from folders import save_tiny_model
from tiny import bpe_tokenizer, tiny_model

from kvpolicy import Engine, Plan, load_model
from kvpolicy.model.chat import ChatEncoder


def without_configuration(folder: Path) -> object:
    (folder / "weights").mkdir()
    return load_model(folder / "weights")


def with_cut_generation_config(folder: Path) -> object:
    save_tiny_model(folder / "model")
    (folder / "model/generation_config.json").write_text('{"eos_token_id": [1,')
    return load_model(folder / "model")


def generating(**config: object) -> Engine:
    model = tiny_model()
    for name, value in config.items():
        setattr(model.generation_config, name, value)
    return Engine(model, plan=Plan.uniform("full"))


def chat(content: str, **variables: object) -> list[int]:
    """A chat whose template puts contents into brackets, and can think."""
    tokenizer = bpe_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.chat_template = (
        "{% if thinking %}!{% endif %}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    return ChatEncoder(tokenizer).tokens(
        [{"role": "user", "content": content}], variables=variables
    )


def of_gguf(folder: Path, *names: str) -> object:
    (folder / "weights").mkdir()
    for name in names:
        (folder / "weights" / name).touch()
    return load_model(folder / "weights")


def of_adapter(folder: Path, **settings: object) -> object:
    (folder / "adapter").mkdir()
    config = json.dumps({"base_model_name_or_path": str(folder / "base"), **settings})
    (folder / "adapter/adapter_config.json").write_text(config)
    return load_model(folder / "adapter")


def of_adapter_without_weights(folder: Path) -> object:
    save_tiny_model(folder / "base")
    return of_adapter(folder, peft_type="LORA", r=2, lora_alpha=4)


def with_other_layers() -> Engine:
    model = tiny_model()
    model.config.num_hidden_layers = 32
    return Engine(model, plan=Plan.uniform("full"))


def attending_twice() -> Engine:
    model = model_of("diffllama", attention_dropout=0.0)
    return Engine(model, plan=Plan.uniform("full"))


CASES: dict[str, Callable[[Path], object]] = {
    "a folder without a model": without_configuration,
    "a folder of several GGUF files": lambda folder: of_gguf(folder, "a-q4.gguf", "a-q8.gguf"),
    "a part of a GGUF file": lambda folder: of_gguf(folder, "a-00002-of-00003.gguf"),
    "a GGUF file that is none": lambda folder: of_gguf(folder, "a.gguf"),
    "a GGUF file that is not there": lambda _: load_model("a.gguf"),
    "an adapter of another kind": lambda folder: of_adapter(folder, peft_type="IA3"),
    "an adapter that does more than to add": lambda folder: of_adapter(
        folder, peft_type="LORA", use_dora=True
    ),
    "an adapter whose model is not there": lambda folder: of_adapter(folder, peft_type="LORA"),
    "an adapter without weights": of_adapter_without_weights,
    "a configuration of another number of layers": lambda _: with_other_layers(),
    "a model that attends twice in a layer": lambda _: attending_twice(),
    "a dtype that is none": lambda folder: load_model(folder, dtype=3),  # type: ignore[arg-type]
    "an end token that is none": lambda _: generating(eos_token_id=[1, "end"]),
    "beam search": lambda _: generating(num_beams=3),
    "a repetition penalty below 0": lambda _: generating(repetition_penalty=-1.0),
    "a generation config that is cut off": with_cut_generation_config,
    "a message that a template makes a token of": lambda _: chat("end>"),
    "a variable that a template does not have": lambda _: chat("a", thinkin=True),
}
