"""The first reasoner's problems as a chat with SmolLM2: the same facts and traces in its marks.

A turn has no system prompt, and an answer begins with ``<think>``, as in R1's template: what is
asked about is the thoughts, and a prompt of a hundred tokens should not have forty more.
"""

import random

from kvpolicy_reasoner.task import EOS, STANDARD, Difficulty, Problem, make_problem

USER, ASSISTANT, THINK, END_OF_TURN = (
    "<|im_start|>user\n",
    "<|im_start|>assistant\n",
    "<think>\n\n",
    "<|im_end|>",
)

# As for the first reasoner, thoughts of earlier answers are left out.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{- "<|im_start|>" + message["role"] + "\n" -}}
{%- if message["role"] == "assistant" -%}
{{- message["content"].split("</think>")[-1].strip() -}}
{%- else -%}
{{- message["content"].strip() -}}
{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\n<think>\n\n" -}}
{%- endif -%}
"""


def make_chat_problem(rng: random.Random, difficulty: Difficulty = STANDARD) -> Problem:
    """Generate one problem of any split.

    Args:
        rng: Random number generator.
        difficulty: Ranges of depth and number of facts.

    Returns:
        The problem, with prompt and trace as the chat template has them.
    """
    problem = make_problem(rng, difficulty)
    question = problem.prompt.removeprefix("<|user|> ").removesuffix("<|assistant|><think>\n\n")
    return Problem(
        prompt=f"{USER}{question}{END_OF_TURN}\n{ASSISTANT}{THINK}",
        trace=problem.trace.removesuffix(EOS) + END_OF_TURN,
        answer=problem.answer,
        depth=problem.depth,
        num_facts=problem.num_facts,
    )
