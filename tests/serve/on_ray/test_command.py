"""`kvpolicy serve` with options for Ray, as far as they need no cluster."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import kvpolicy, model_folder
from shell import Shell, refusal

from kvpolicy import Plan
from kvpolicy.serve.on_ray.config import ServeConfig

__all__ = ["kvpolicy", "model_folder"]

PLAN = 'stack = ["h2o"]\nbudget = 24\nbuffer = 8\n'


def written(kvpolicy: Shell, folder: Path, *words: object) -> dict[str, Any]:
    file = folder / "deployment.yaml"
    answer = kvpolicy("serve", "--write-deployment", file, *words)
    assert answer.status == 0, answer.err
    assert f"serve deploy {file}" in answer.err
    return yaml.safe_load(file.read_text("utf-8"))


def test_a_deployment_file_has_what_was_given(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOLICY_API_KEY", "secret")
    (tmp_path / "h2o.toml").write_text(PLAN, encoding="utf-8")
    words = ("--model", model_folder, "--plan", f"small={tmp_path / 'h2o.toml'}", "--slots", 3)
    more = ("--replicas", 2, "--max-replicas", 5, "--cpus-per-replica", 4, "--port", 8123)
    more += ("--prefix-cache", "8MiB", "--prefix-block", 32, "--prefix-prompts-only")
    more += ("--log-format", "json")
    more += ("--max-tokens-per-forward", 700)
    found = written(kvpolicy, tmp_path, *words, *more, "--max-waiting", 9)
    assert found["http_options"] == {"host": "127.0.0.1", "port": 8123}
    (application,) = found["applications"]
    config = ServeConfig.from_dict(application["args"])
    expected = Plan.load(tmp_path / "h2o.toml")
    assert config.read_plans() == {"small": expected}
    assert (config.name, config.model) == (model_folder.name, str(model_folder))
    assert (config.requests, config.setup.threads, config.needs_key) == (6, 4, True)
    assert config.json_logs
    assert config.engine["max_waiting"] == 9
    assert config.engine["max_tokens_per_forward"] == 700
    store = {"capacity": 8 << 20, "block_tokens": 32, "eviction": "lru", "conversations": False}
    assert config.prefix_store == store
    assert "secret" not in (tmp_path / "deployment.yaml").read_text("utf-8")
    assert application["deployments"] == [
        {
            "name": "Replica",
            "autoscaling_config": {
                "min_replicas": 2,
                "max_replicas": 5,
                "target_ongoing_requests": 3,
            },
            "ray_actor_options": {"num_cpus": 4, "num_gpus": 0},
            "max_queued_requests": 14,
            "max_surge_percent": 0,
        }
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replicas", 2), "--on ray"),
        (("--gpus-per-replica", 0), "--gpus-per-replica"),
        (
            ("--write-deployment", "x.yaml", "--replicas", 3, "--max-replicas", 2),
            "--max-replicas",
        ),
        (
            ("--write-deployment", "x.yaml", "--gpus-per-replica", 1.5),
            "GPUs",
        ),
        (("--on", "ray", "--ray-address", "ray://a:1"), "Ray Client"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    kvpolicy: Shell,
    model_folder: Path,
    words: tuple[object, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "ray" in words:
        pytest.importorskip("ray")
    if "--port" not in words:
        words = (*words, "--port", 0)
    answer = kvpolicy("serve", "--model", model_folder, "--policy", "full", *words)
    assert message in refusal(answer)
    assert not list(tmp_path.iterdir())
