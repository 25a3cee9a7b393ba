"""Tasks of lm-evaluation-harness in local files: YAML and a few questions, no network."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

_HEAD = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
"""

BOXED = r"""output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: []
  max_gen_toks: 400
filter_list:
  - name: box
    filter:
      - function: regex
        regex_pattern: 'boxed\{(-?\d+)\}'
        group_select: -1
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""

CHOICE = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
fewshot_split: train
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""

ROLLING = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""


def write_task(
    folder: Path, name: str, body: str, rows: Sequence[Mapping[str, object]], *, data: str = ""
) -> Path:
    """Write a task and its questions; ``data`` replaces the path of the questions."""
    folder.mkdir(exist_ok=True)
    questions = folder / f"{name}.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = folder / f"{name}.yaml"
    file.write_text(_HEAD.format(name=name, data=data or questions) + body, encoding="utf-8")
    return file
