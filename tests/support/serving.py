"""A server in a thread of this process, on a free port of the loopback interface.

What is timed in its event loop, such as its limits, is timed by a clock that a test can advance;
steps of its engines can be held back.
"""

import asyncio
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import httpx2
import openai
import torch
from prometheus_client.parser import text_string_to_metric_families
from step_gate import Gate
from tiny import shared_model, tiny_tokenizer

from kvpolicy import Plan, PrefixStore
from kvpolicy.serve.launch import bound_to, hosts_of, served_model, socket_url
from kvpolicy.serve.plans import ServedModel, ServedPlan
from kvpolicy.serve.server import Certificate, Server
from kvpolicy.serve.service import Service
from kvpolicy.serve.settings import ServerSettings

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
PATIENCE_S = 60.0  # for what must come, on a busy machine

# A small request, and where it is sent.
BODY: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2}
PATH = "/v1/completions"


def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it has not come to hold"
        time.sleep(0.005)


def break_next_step(plan: ServedPlan, error: BaseException) -> None:
    """Have the engine of a plan break in its next step."""

    def fail() -> None:
        raise error

    plan.running.before_step = fail


async def break_engine(plan: ServedPlan, error: BaseException) -> None:
    """Have the engine of a plan break now, whether it has requests or not."""
    break_next_step(plan, error)
    await plan.running.between_steps(lambda _: None)  # a step follows


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop in which time can be skipped."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self._skipped = 0.0

    def time(self) -> float:
        return super().time() + self._skipped

    async def skip(self, seconds: float) -> None:
        """Advance the clock, once what goes on waits; return when what was due has been done."""
        await _turns()
        self._skipped += seconds
        await _turns()


async def _turns() -> None:
    """Let the event loop do what follows at once from what has happened."""
    for _ in range(20):
        await asyncio.sleep(0)


@attrs.define(eq=False)
class Running:
    """A server that runs."""

    url: str
    model: ServedModel
    server: Server
    thread: threading.Thread
    loop: SkippingLoop
    gates: dict[str, Gate]
    clients: list[openai.OpenAI]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def gate(self) -> Gate:
        """That of the first plan."""
        return next(iter(self.gates.values()))

    @property
    def plan(self) -> ServedPlan:
        return self.model.plans[0]

    def client(self, **options: Any) -> openai.OpenAI:
        given = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | options
        # To read the certificates that are trusted would take longer than to start the server.
        http = openai.DefaultHttpxClient(verify=False)
        self.clients.append(openai.OpenAI(http_client=http, **given))
        return self.clients[-1]

    def http(self, **options: Any) -> httpx2.Client:
        given = {"base_url": self.url, "timeout": PATIENCE_S, "trust_env": False, "verify": False}
        return httpx2.Client(**given | options)

    def health(self) -> tuple[int, int]:
        """Status of liveness and of readiness."""
        with self.http() as http:
            return http.get("/health/live").status_code, http.get("/health/ready").status_code

    def stop(self) -> None:
        self.server.stop()

    def wait_for(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine in the event loop of the server."""
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def skip(self, seconds: float) -> None:
        """Let time pass for the server, but for its engines."""
        self.wait_for(self.loop.skip(seconds))

    def num_open(self) -> int:
        """Choices that run or wait; those of `stats` are as old as the last step."""
        return sum(plan.running.num_open for plan in self.model.plans)

    def idle(self) -> bool:
        return self.num_open() == 0


def plans_of(**policies: int) -> dict[str, Plan]:
    """Plans by policy, with a budget each."""
    return {
        name: Plan.uniform(name, **({"budget": budget, "buffer": 4} if budget else {}))
        for name, budget in policies.items()
    }


@contextmanager
def serving(
    plans: Mapping[str, Plan] | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    name: str = "tiny",
    slots: int = 2,
    max_waiting: int = 64,
    kv_memory: int | None = None,
    prefix_store: PrefixStore | None = None,
    aliases: Sequence[str] = (),
    certificate: Certificate | None = None,
    send_buffer: int | None = None,
    processor: Any = None,
    lacks_processor: bool = False,
    **settings: Any,
) -> Iterator[Running]:
    """Run a server.

    `send_buffer` is that of the connections, in bytes: what a client may leave unread.
    """
    if tokenizer is None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
    given = ServerSettings(**({"hosts": hosts_of("127.0.0.1", [])} | settings))
    model = model or shared_model(dtype=torch.float64)
    served = served_model(
        name,
        model,
        tokenizer,
        plans or plans_of(full=0),
        given,
        max_waiting=max_waiting,
        kv_memory=kv_memory,
        prefix_store=prefix_store,
        aliases=aliases,
        processor=processor,
        lacks_processor=lacks_processor,
        slots=slots,
    )
    gates = {plan.name: Gate() for plan in served.plans}
    for plan in served.plans:
        plan.running.before_step = gates[plan.name].wait
    service = Service(served, given)
    started = threading.Event()
    clients: list[openai.OpenAI] = []
    with bound_to("127.0.0.1", 0) as listening:
        if send_buffer is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = Server(service, started.set, certificate)
        loop = SkippingLoop()
        thread = threading.Thread(target=_run, args=(loop, server, listening))
        thread.start()
        try:
            assert started.wait(PATIENCE_S)
            url = socket_url(listening, "http" if certificate is None else "https")
            yield Running(url, served, server, thread, loop, gates, clients)
        finally:
            for client in clients:
                client.close()
            for gate in gates.values():
                gate.open()
            server.stop()
            server.stop()  # at once
            thread.join(PATIENCE_S)
    assert not thread.is_alive()


def _run(loop: SkippingLoop, server: Server, listening: socket.socket) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(server.serve([listening]))


def metrics(running: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels."""
    with running.http() as http:
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name.removeprefix("kvpolicy_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def of_plan(plan: str, **labels: str) -> tuple[tuple[str, str], ...]:
    """The labels of a sample of a plan."""
    return tuple(sorted({"plan": plan, **labels}.items()))


def error_of(answer: httpx2.Response) -> dict[str, str]:
    """The error of an answer, in OpenAI's shape: one sentence."""
    (error,) = answer.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "?"))
    assert "\n" not in error["message"]
    found: dict[str, str] = error
    return found


@contextmanager
def connection(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as sock:
        yield sock


def head_of(length: int, *lines: str) -> bytes:
    """The head of a request for a completion whose body has so many bytes."""
    given = (
        f"POST {PATH} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *lines,
    )
    return "".join(f"{line}\r\n" for line in (*given, "")).encode()


def post_of(body: Mapping[str, Any]) -> bytes:
    """The bytes of a request for a completion."""
    content = json.dumps(body).encode()
    return head_of(len(content)) + content


def rest_of(sock: socket.socket) -> bytes:
    """Everything that a server sends until it closes a connection."""
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


def answer_to(server: Running, request: bytes) -> bytes:
    """Everything that a server answers to some bytes until it closes the connection."""
    with connection(server) as sock:
        sock.sendall(request)
        return rest_of(sock)
