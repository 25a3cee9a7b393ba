"""What an operator sees: metrics, logs, health, and how a server stops."""

import io
import json
import logging
import threading
import time
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import BODY, PATH, PATIENCE_S, metrics, of_plan, plans_of, serving, until

from kvpolicy.serve import logs
from kvpolicy.serve.settings import SHUTDOWN_TIMEOUT_S

LONG = {**BODY, "max_tokens": 80}
SECRET = "xq7zw"  # in a prompt, a stop string, a user and a key


# Metrics


def test_metrics_count_requests_tokens_and_rows() -> None:
    with serving(plans_of(full=0, h2o=12)) as running:
        client = running.client()
        usages = [
            client.completions.create(
                model="tiny:h2o", prompt="a" * 20, max_tokens=num, temperature=0
            ).usage
            for num in (10, 30)
        ]
        list(client.completions.create(**BODY, n=2, stream=True))
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**BODY, extra_body={"tools": [{}]})
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{**BODY, "max_tokens": 600})
        found = metrics(running)
        stats = {plan.name: plan.stats for plan in running.model.plans}
    h2o, full = of_plan("h2o"), of_plan("full")
    assert found["requests_total", of_plan("h2o", outcome="completed")] == 2
    assert found["requests_total", of_plan("full", outcome="completed")] == 1
    assert found["requests_total", of_plan("", outcome="invalid")] == 1
    assert found["requests_total", of_plan("full", outcome="invalid")] == 1
    assert found["http_responses_total", (("status", "200"),)] == 3
    assert found["http_responses_total", (("status", "400"),)] == 2
    assert found["new_tokens_sum", h2o] == found["engine_new_tokens_total", h2o] == 40
    assert found["new_tokens_sum", full] == 4
    assert found["prompt_tokens_sum", h2o] == found["engine_prompt_tokens_total", h2o] == 40
    evicted = sum(usage.model_extra["kvpolicy"]["rows_evicted"] for usage in usages if usage)
    assert found["rows_evicted_total", h2o] == evicted > 0
    assert found["rows_evicted_total", full] == found["compactions_total", full] == 0
    assert found["compactions_total", h2o] == stats["h2o"].report.compactions > 0
    assert found["policy_seconds_total", h2o] == pytest.approx(stats["h2o"].report.policy_s)
    hooks = [value for (name, _), value in found.items() if name == "policy_hook_seconds_total"]
    totals = [value for (name, _), value in found.items() if name == "policy_seconds_total"]
    assert sum(hooks) == pytest.approx(sum(totals))
    for name in ("time_to_first_token_seconds", "request_seconds"):
        assert found[f"{name}_count", h2o] == 2
        assert found[f"{name}_sum", h2o] > 0
    # One for each choice of two tokens or more.
    assert found["time_per_token_seconds_count", full] == 2
    assert found["slots", h2o] == 2
    assert found["cache_bytes", full] > found["cache_bytes", h2o] > 0


@pytest.mark.slow
def test_first_token_is_sent_and_timed_before_the_next_one_is_computed() -> None:
    wants = {"kvpolicy": {"token_ids": True}}
    with serving() as running, running.gate.closed(after=1):
        sent = time.monotonic()
        stream = iter(running.client().completions.create(**LONG, stream=True, extra_body=wants))
        first = next(stream)
        came = time.monotonic()
        (extra,) = (choice.model_extra for choice in first.choices)
        assert extra is not None
        assert len(extra["token_ids"]) == 1
        running.gate.open()
        list(stream)
        until(lambda: running.idle())
        found = metrics(running)
    assert found["time_to_first_token_seconds_count", of_plan("full")] == 1
    assert found["time_to_first_token_seconds_sum", of_plan("full")] <= came - sent


def test_gauges_tell_what_waits_and_what_runs() -> None:
    with serving(slots=2) as running:
        client = running.client()
        streams = [client.completions.create(**LONG, stream=True) for _ in range(5)]
        for stream in streams[:2]:
            next(iter(stream))

        def state() -> tuple[float, float]:
            found = metrics(running)
            full = of_plan("full")
            return found["requests_running", full], found["requests_waiting", full]

        until(lambda: state() == (2, 3))
        found = metrics(running)
        rows = {name: value for name, value in found.items() if name[0] == "rows"}
        assert [dict(labels)["layer"] for _, labels in rows] == ["0", "1"]
        assert all(value > 0 for value in rows.values())
        assert found["held_bytes", of_plan("full")] > 0
        for stream in streams:
            stream.close()
        until(lambda: state() == (0, 0))
        until(lambda: sum(v for n, v in metrics(running).items() if n[0] == "rows") == 0)


def test_buckets_are_sorted_and_every_metric_has_a_text() -> None:
    with serving() as running, running.http() as http:
        http.post(PATH, json=BODY)
        text = http.get("/metrics").text
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("kvpolicy_")
        assert family.documentation.endswith(".")
        assert family.type != "unknown"


@pytest.mark.nightly
def test_servers_of_one_process_count_for_themselves() -> None:
    with serving() as one, serving() as other:
        one.client().completions.create(**BODY)
        key = ("requests_total", of_plan("full", outcome="completed"))
        assert metrics(one)[key] == 1
        assert key not in metrics(other)


# Logs


def records(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_a_request_is_one_line_with_its_counts(lines: io.StringIO) -> None:
    with serving(plans_of(h2o=12)) as running:
        headers = {"X-Request-Id": "job-1"}
        usage = (
            running.client()
            .completions.create(**{**BODY, "prompt": "a" * 30}, n=2, extra_headers=headers)
            .usage
        )
        until(lambda: records(lines))
    assert usage is not None
    found = records(lines)[0]
    assert found.pop("time").endswith("+00:00")
    times = [found.pop(name) for name in ("elapsed_s", "first_token_s", "per_token_s")]
    assert min(times) > 0
    assert found == {
        "level": "info",
        "event": "request",
        "request_id": "job-1",
        "method": "POST",
        "path": PATH,
        "status": 200,
        "plan": "h2o",
        "stream": False,
        "outcome": "completed",
        "choices": 2,
        "prompt_tokens": 30,
        "new_tokens": 4,
        "rows_evicted": usage.model_extra["kvpolicy"]["rows_evicted"],
    }


def test_the_log_has_no_word_of_what_was_said(lines: io.StringIO) -> None:
    with serving(api_keys=(SECRET,)) as running:
        client = running.client(api_key=SECRET)
        talk: Any = [{"role": "user", "content": SECRET}]
        body = {**BODY, "prompt": SECRET, "stop": f"{SECRET}9", "user": SECRET}
        client.completions.create(**body)
        list(client.completions.create(**body, stream=True))
        client.chat.completions.create(model="tiny", messages=talk, max_tokens=1)
        with running.http(headers={"Authorization": f"Bearer {SECRET}"}) as http:
            for path in (
                f"/{SECRET}",
                f"/v1/models/{SECRET}",
                f"/health?{SECRET}",
                f"/%0a{SECRET}",
            ):
                http.get(path)
            http.post(PATH, content=SECRET, headers={"Content-Type": "application/json"})
            http.post(PATH, json={**BODY, "model": SECRET})
            http.post(PATH, json={**BODY, SECRET: 1})
            http.post(PATH, json={**BODY, "prompt": [SECRET, "\0"]})
            http.get("/health", headers={"X-Request-Id": f"{SECRET} {SECRET}", "X": SECRET})
        until(lambda: len(records(lines)) == 12)
    text = lines.getvalue()
    assert SECRET not in text
    assert [one["event"] for one in records(lines)] == ["request"] * 12 + ["stopping"]


def test_a_defect_is_logged_by_its_class_and_place_only(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(SECRET)

    with serving() as running:
        monkeypatch.setattr("kvpolicy.serve.service.requests_of", broken)
        with pytest.raises(openai.InternalServerError, match="req-") as caught:
            running.client().completions.create(**BODY)
        assert SECRET not in str(caught.value)
        monkeypatch.undo()
        until(lambda: len(records(lines)) == 2)
        defect, request = records(lines)
        monkeypatch.setattr("kvpolicy.serve.replies.Reply.pieces", broken)
        with pytest.raises(openai.APIError, match="req-"):
            list(running.client().completions.create(**BODY, stream=True))
        until(lambda: len(records(lines)) == 4)
        assert records(lines)[3]["outcome"] == "failed"
    assert (defect["event"], defect["level"]) == ("defect", "error")
    assert defect["error"] == "ZeroDivisionError"
    assert "test_operation.py" in defect["at"][-1]
    assert (request["status"], request["outcome"]) == (500, "failed")
    assert SECRET not in lines.getvalue()


def test_text_lines_have_the_same_and_escape_what_does_not_print() -> None:
    record = logging.LogRecord("kvpolicy.serve", logging.INFO, "", 0, "request", None, None)
    record.fields = {"request_id": "a\x1b[31m\nb", "plan": "", "outcome": None, "status": 200}
    line = logs.TextFormatter().format(record)
    assert line.endswith(r" info request request_id=a\u001b[31m\nb status=200")


# Health, and the end


@pytest.mark.slow
def test_a_server_that_stops_finishes_what_runs_and_refuses_what_comes() -> None:
    with serving(slots=1) as running:
        client = running.client()
        body = {**BODY, "max_tokens": 20, "seed": 1}
        expected = client.completions.create(**body).choices[0].text
        running.gate.close()
        first = client.completions.create(**body, stream=True)
        second = client.completions.create(**body, stream=True)
        until(lambda: running.num_open() == 2)
        running.server.stop()
        until(lambda: running.health() == (200, 503))
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**BODY)
        assert caught.value.status_code == 503
        assert caught.value.code == "shutting_down"
        assert caught.value.response.headers["retry-after"] == "5"
        assert client.models.list().data
        running.gate.open()
        for stream in (first, second):
            assert "".join(chunk.choices[0].text for chunk in stream) == expected
        running.thread.join(PATIENCE_S)
        assert not running.thread.is_alive()
        assert running.server.num_cancelled == 0


def test_what_does_not_end_in_time_is_cancelled_with_an_error() -> None:
    with serving(slots=1) as running:
        client = running.client()
        running.gate.close()
        stream = client.completions.create(**LONG, stream=True)
        failures: list[Exception] = []

        def wait() -> None:
            try:
                client.completions.create(**LONG)
            except openai.APIError as error:
                failures.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: running.num_open() == 2)
        running.server.stop()
        until(lambda: running.health() == (200, 503))
        running.skip(SHUTDOWN_TIMEOUT_S)
        running.gate.open()
        with pytest.raises(openai.APIError) as ended:
            list(stream)
        assert ended.value.code == "shutting_down"
        waiting.join()
        assert isinstance(failures[0], openai.InternalServerError)
        assert failures[0].status_code == 503
        running.thread.join(PATIENCE_S)
        assert running.server.num_cancelled == 2


def test_a_second_signal_ends_what_runs_at_once() -> None:
    with serving(slots=1, shutdown_timeout_s=60) as running:
        stream = running.client().completions.create(**{**LONG, "prompt": ["a"] * 60}, stream=True)
        next(iter(stream))
        running.server.stop()
        running.server.stop()
        running.thread.join(PATIENCE_S)
        assert not running.thread.is_alive()
        with pytest.raises(openai.APIError) as ended:
            list(stream)
        assert ended.value.code == "shutting_down"
