"""Throughput of servers: `kvpolicy serve` beside `Engine.generate`, transformers and vLLM.

    python docs/benchmarks/serving_throughput.py --vllm-python ~/vllm/bin/python --json FILE
    python docs/benchmarks/serving_throughput.py --quick

A random model and a tokenizer whose tokens are words are saved to a temporary folder. Each server
is a process that serves them on a port of its own; the engine without a server is another process.
In every round each of them gets the same requests, which no other round has; every round starts
with another one. Processes that are not measured are stopped meanwhile. The clients are a process
on other cores than servers and engine, so that their processor time, which is shown, costs these
nothing.

Linux only. serving.md says how to read the table.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import urlopen

import attrs
import numpy as np
import psutil
import torch

from kvpolicy.cli.output import Progress, info, terminal_width
from kvpolicy.cli.text_table import format_table
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import atomic_write
from kvpolicy.lab.figure import WIDTHS, LegendContent, Size, legend_entry, line_look, save_figure
from kvpolicy.lab.looks import looks_of
from kvpolicy.lab.store.session import describe_session
from kvpolicy.quantities import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
ENGINE, KVPOLICY = "Engine.generate", "kvpolicy serve"
TRANSFORMERS, VLLM = "transformers serve", "vLLM"
PLANS = {
    "full": 'stack = ["full"]\n',
    "snapkv": 'stack = ["snapkv"]\nbudget = 128\nbuffer = 64\n',
}
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
HAS_ENDED, IS_LATE = "has ended", f"did not answer within {START_TIMEOUT_S:.0f} s"
WARM_UP_TOKENS = 8
WEIGHTS = 5.0  # factor of a layer's weights, with which answers do not repeat one token
PAGE = 256  # tokens of a page of transformers' cache
LEAST_MS = 1.0  # in figures
CHUNK = 256  # most tokens in a forward of transformers


@attrs.frozen
class Load:
    """What is asked for.

    Attributes:
        shape: Shape of the model, of `kvpolicy.lab.bench.models.SHAPES`.
        requests: Requests of a round.
        clients: Clients, and slots of the engine.
        prompt: The fewest and most tokens of a prompt.
        new: The fewest and most tokens of an answer.
        rounds: Rounds.
    """

    shape: str = "100m"
    requests: int = 32
    clients: int = 16
    prompt: tuple[int, int] = (64, 256)
    new: tuple[int, int] = (128, 256)
    rounds: int = 5

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt[1] + self.new[1]

    def requests_of(self, number: int, vocab_size: int) -> list[dict[str, Any]]:
        """The requests of a round: lengths as in every other, words as in none."""
        lengths, words = Random(0), Random(f"round {number}")
        sizes = [
            (lengths.randint(*self.prompt), lengths.randint(*self.new))
            for _ in range(self.requests)
        ]
        return [
            {
                "prompt": " ".join(word(words.randrange(1, vocab_size)) for _ in range(num_prompt)),
                "max_tokens": num_new,
            }
            for num_prompt, num_new in sizes
        ]


QUICK = Load("tiny", requests=6, clients=3, prompt=(8, 24), new=(6, 12), rounds=2)


@attrs.frozen
class Answer:
    """One answer.

    Attributes:
        sent_s: When its request was sent, in seconds of the turn.
        times: When each token came.
        text: The text.
        error: Why there is none, or only a part.
    """

    sent_s: float
    times: Sequence[float]
    text: str
    error: str | None

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent_s

    @property
    def between_s(self) -> list[float]:
        """Seconds between each token and the one before; 0 for those that came with it."""
        return np.diff(self.times).tolist()


@attrs.frozen
class Turn:
    """One contender in one round.

    Attributes:
        round: Number of the round, from 0.
        name: The contender.
        elapsed_s: From the first request to the last token.
        wanted: Tokens that each request asked for.
        answers: The answer to each request.
        cpu_s: Processor seconds of the server or the engine.
        clients_cpu_s: Processor seconds of the clients; ``None`` without a server.
        peak_bytes: Peak of its resident memory, the sum over its processes.
    """

    round: int
    name: str
    elapsed_s: float
    wanted: Sequence[int]
    answers: Sequence[Answer]
    cpu_s: float
    clients_cpu_s: float | None
    peak_bytes: int

    @property
    def tok_s(self) -> float:
        """Tokens per second."""
        return sum(len(one.times) for one in self.answers) / self.elapsed_s

    @property
    def problems(self) -> list[str]:
        """What is wrong with answers: errors, and other numbers of tokens than were wanted."""
        found = []
        for one, wanted in zip(self.answers, self.wanted, strict=True):
            num_tokens = len(one.text.split())
            if one.error is not None:
                found.append(one.error)
            elif {num_tokens, len(one.times)} != {wanted}:
                found.append(f"{num_tokens} tokens where {wanted} were wanted")
        return found


# Processes


@contextmanager
def running_on(cores: Sequence[int]) -> Iterator[None]:
    """Have processes that are started in the block run on some cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Child:
    """A process and those that it starts, in a session of their own.

    Its standard input and output take and give lines of JSON, unless it is a server.
    """

    def __init__(
        self,
        command: Sequence[str],
        cores: Sequence[int],
        log: Path,
        *,
        environment: Mapping[str, str],
        is_server: bool,
    ) -> None:
        self._log = log
        try:
            with log.open("wb") as said, running_on(cores):
                self._popen = subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL if is_server else subprocess.PIPE,
                    stdout=said if is_server else subprocess.PIPE,
                    stderr=said,
                    text=True,
                    start_new_session=True,
                )
        except OSError as error:
            msg = f"{command[0]} cannot be started ({error.strerror})"
            raise KVPolicyError(msg) from error
        self._process = psutil.Process(self._popen.pid)

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Send a line, and wait for the answer."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            print(json.dumps(asked), file=self._popen.stdin, flush=True)
            line = self._popen.stdout.readline()
        if not line:
            raise self._failure(HAS_ENDED)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def wait_until_healthy(self, url: str) -> None:
        """Wait until a server answers ``/health``; `KVPolicyError` if it ends or takes too long."""
        ends_at = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < ends_at:
            self.check_running()
            with suppress(URLError, OSError), urlopen(f"{url}/health", timeout=5):
                return
            time.sleep(0.2)
        raise self._failure(IS_LATE)

    def check_running(self) -> None:
        """Raise `KVPolicyError` if the process has ended."""
        if self._popen.poll() is not None:
            raise self._failure(HAS_ENDED)

    def stop(self) -> None:
        """Stop all processes, as Ctrl-Z does."""
        for one in self._processes():
            one.suspend()

    def resume(self) -> None:
        """Let all processes run again."""
        for one in self._processes():
            one.resume()

    @property
    def cpu_s(self) -> float:
        """Processor seconds so far."""
        times = [one.cpu_times() for one in self._processes()]
        return sum(one.user + one.system for one in times)

    def reset_peak(self) -> None:
        """Let the peak of the memory begin anew."""
        for one in self._processes():
            # Where this is not allowed, the peak includes the start.
            with suppress(OSError):
                Path(f"/proc/{one.pid}/clear_refs").write_text("5")

    @property
    def peak_bytes(self) -> int:
        """Peak of the resident memory of each process, in all."""
        return sum(
            int(line.split()[1]) * 1024
            for one in self._processes()
            for line in Path(f"/proc/{one.pid}/status").read_text().splitlines()
            if line.startswith("VmHWM:")
        )

    def close(self) -> None:
        """End all processes."""
        found = self._processes()
        for one in found:
            with suppress(psutil.NoSuchProcess):
                one.resume()
        self._popen.terminate()
        _, alive = psutil.wait_procs(found, timeout=STOP_TIMEOUT_S)
        for one in alive:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self._popen.communicate()

    def _processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [self._process, *self._process.children(recursive=True)]
        return []

    def _failure(self, what: str) -> KVPolicyError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        line = next((line.strip() for line in reversed(lines) if line.strip()), "none")
        return KVPolicyError(f"the process of {self._log.stem} {what}; its last line: {line:.300}")


@attrs.frozen
class Contender:
    """A process that is ready to generate.

    Attributes:
        name: Name in tables.
        base: Name of the engine that its speed is compared with.
        child: The process.
        generate: Answers requests.
        clients: The clients that it is asked by; ``None`` without a server.
    """

    name: str
    base: str
    child: Child
    generate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    clients: Child | None = None

    def turn(self, number: int, requests: Sequence[Mapping[str, Any]]) -> Turn:
        """Answer the requests of a round; the processes are stopped before and after."""
        self.child.resume()
        self.child.reset_peak()
        working = [self.child] if self.clients is None else [self.child, self.clients]
        before = [one.cpu_s for one in working]
        answered = self.generate(requests)
        self.child.check_running()
        cpu_s, *of_clients = [one.cpu_s - then for one, then in zip(working, before, strict=True)]
        peak_bytes = self.child.peak_bytes
        self.child.stop()
        return Turn(
            round=number,
            name=self.name,
            elapsed_s=answered["elapsed_s"],
            wanted=[one["max_tokens"] for one in requests],
            answers=[Answer(**one) for one in answered["answers"]],
            cpu_s=cpu_s,
            clients_cpu_s=of_clients[0] if of_clients else None,
            peak_bytes=peak_bytes,
        )


# Contenders


@attrs.frozen
class Launcher:
    """Starts contenders on one model.

    Attributes:
        folder: A temporary folder; the model is in ``model``.
        load: What is asked for.
        cores: Cores of servers and engine.
        stack: Ends the processes.
        clients: The process of the clients.
        cpu_weights: Order of kvpolicy's weights: ``"plain"`` or ``"packed"``.
    """

    folder: Path
    load: Load
    cores: Sequence[int]
    stack: ExitStack
    clients: Child
    cpu_weights: str

    @property
    def model(self) -> Path:
        """Folder of the model."""
        return self.folder / "model"

    def engine(self, plan: str, file: str) -> Contender:
        """`Engine.generate` under a plan."""
        name = f"{ENGINE}, {plan}"
        command = [sys.executable, str(HERE / "serving_engine.py")]
        child = self._start(name, command, is_server=False)
        child.ask(
            model=str(self.model),
            plan=file,
            slots=self.load.clients,
            cpu_weights=self.cpu_weights,
        )
        return Contender(name, name, child, lambda requests: child.ask(requests=requests))

    def kvpolicy(self, plan: str, file: str) -> Contender:
        """``kvpolicy serve`` under a plan."""
        command = [sys.executable, "-m", "kvpolicy", "serve", "--model", str(self.model)]
        command += ["--plan", f"{plan}={file}", "--slots", str(self.load.clients)]
        command += ["--cpu-weights", self.cpu_weights]
        name, base = f"{KVPOLICY}, {plan}", f"{ENGINE}, {plan}"
        return self._server(name, base, command, model=self.model.name)

    def transformers(self, base: str) -> Contender:
        """transformers' server, with continuous batching."""
        (self.folder / "hub").mkdir()  # without it, the server fails
        main = "from transformers.cli.transformers import main; main()"
        pages = self.load.clients * -(-self.load.most_tokens // PAGE)
        command = [sys.executable, "-c", main, "serve", str(self.model), "--device", "cpu"]
        command += ["--continuous-batching", "--cb-num-blocks", str(pages)]
        command += ["--cb-max-batch-tokens", str(CHUNK)]
        return self._server(TRANSFORMERS, base, command, HF_HOME=str(self.folder))

    def vllm(self, base: str, python: Path) -> Contender:
        """vLLM's server; prefixes are not cached, since no other server here caches them."""
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--dtype", "float32"]
        command += ["--no-enable-prefix-caching", "--max-num-seqs", str(self.load.clients)]
        command += ["--max-model-len", str(self.load.most_tokens)]
        return self._server(
            VLLM,
            base,
            command,
            VLLM_CPU_KVCACHE_SPACE="1",  # GiB
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_NO_USAGE_STATS="1",
        )

    def _server(
        self, name: str, base: str, command: list[str], *, model: str = "", **environment: str
    ) -> Contender:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        address = ["--host", "127.0.0.1", "--port", str(port)]
        child = self._start(name, [*command, *address], is_server=True, **environment)
        try:
            child.wait_until_healthy(url)
        except KVPolicyError:
            child.close()
            raise
        num_clients = self.load.clients

        def generate(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            return self.clients.ask(
                base_url=url,
                model=model or str(self.model),
                clients=num_clients,
                requests=requests,
            )

        return Contender(name, base, child, generate, self.clients)

    def _start(
        self, name: str, command: list[str], *, is_server: bool, **environment: str
    ) -> Child:
        common = {"OMP_NUM_THREADS": str(len(self.cores)), "HF_HUB_OFFLINE": "1"}
        child = Child(
            command,
            self.cores,
            self.folder / f"{name}.log",
            environment={**common, **environment},
            is_server=is_server,
        )
        self.stack.callback(child.close)
        return child


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def word(token: int) -> str:
    """The text of a token."""
    return f"w{token:05d}"


def save_model(folder: Path, load: Load) -> int:
    """Save a random model and a tokenizer; both have no token that ends a text.

    Returns:
        Size of the vocabulary.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from kvpolicy.lab.bench.models import random_model, shape_named

    shape = shape_named(load.shape)
    model = random_model(shape, 0, max_positions=load.most_tokens)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in layer.parameters():
                weight *= WEIGHTS if weight.ndim > 1 else 1
    model.save_pretrained(folder)
    words = {word(token): token for token in range(shape.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template="{% for one in messages %}{{ one['content'] + ' ' }}{% endfor %}",
    ).save_pretrained(folder)
    return shape.vocab_size


def start_all(
    launcher: Launcher, plans: Mapping[str, str], others: Mapping[str, Callable[[str], Contender]]
) -> tuple[list[Contender], dict[str, str]]:
    """Start all contenders, one after another, and stop them.

    Args:
        launcher: Starts them.
        plans: Plan files by their names. Other servers are compared with the engine under the
            first one.
        others: Starts other servers, given the name of that engine.

    Returns:
        The contenders in the order of tables, and why others are absent.

    Raises:
        KVPolicyError: One of kvpolicy's cannot be started.
    """
    found: list[Contender] = []
    absent: dict[str, str] = {}
    with Progress(2 * len(plans) + len(others)) as progress:

        def add(contender: Contender) -> None:
            contender.child.stop()
            found.append(contender)
            progress.log(f"{contender.name}: ready")

        for plan, file in plans.items():
            add(launcher.engine(plan, file))
            add(launcher.kvpolicy(plan, file))
        for name, start in others.items():
            try:
                add(start(found[0].name))
            except KVPolicyError as error:
                absent[name] = str(error)
    return found, absent


def measure(contenders: Sequence[Contender], load: Load, vocab_size: int) -> Iterator[Turn]:
    """All rounds, after a short one that warms up and is not counted.

    Args:
        contenders: The contenders, stopped.
        load: What is asked for.
        vocab_size: Words of the prompts.
    """
    warm_up = attrs.evolve(
        load, requests=load.clients, new=(WARM_UP_TOKENS, WARM_UP_TOKENS)
    ).requests_of(-1, vocab_size)
    for one in contenders:
        one.turn(-1, warm_up)
    for number in range(load.rounds):
        requests = load.requests_of(number, vocab_size)
        first = number % len(contenders)
        for one in [*contenders[first:], *contenders[:first]]:
            yield one.turn(number, requests)


# Results


def tables(turns: Sequence[Turn], bases: Mapping[str, str]) -> str:
    """Speed and what it costs; both tables have a row for each contender.

    Args:
        turns: All turns of all rounds.
        bases: Name of the engine that each contender is compared with.
    """
    by_name = {name: [one for one in turns if one.name == name] for name in bases}
    speeds, costs = [], []
    for name, mine in by_name.items():
        theirs = by_name[bases[name]]
        ratios = [one.tok_s / other.tok_s for one, other in zip(mine, theirs, strict=True)]
        num_answers = sum(len(one.answers) for one in mine)
        num_wrong = sum(len(one.problems) for one in mine)
        num_same = sum(map(same_texts, mine, theirs))
        speeds.append(
            [
                name,
                *_spread([one.tok_s for one in mine], ".1f"),
                *_spread(ratios, ".3f"),
                f"{num_answers - num_wrong} of {num_answers}",
                f"{num_same} of {num_answers}",
            ]
        )
        of_clients = [one.clients_cpu_s for one in mine if one.clients_cpu_s is not None]
        costs.append(
            [
                name,
                # The engine has all requests from the start: most wait for a slot.
                *(_percentiles(first_tokens_s(mine)) if of_clients else ("-", "-")),
                *_percentiles(between_tokens_s(mine)),
                f"{median(one.cpu_s for one in mine):.1f}",
                f"{median(of_clients):.2f}" if of_clients else "-",
                format_bytes(max(one.peak_bytes for one in mine)),
            ]
        )
    first = ["", "tok/s", "range", "x engine", "range", "whole answers", "same text"]
    second = ["", "first token: p50", "p95", "next: p50", "p95", "CPU s", "clients' CPU s"]
    second += ["peak memory"]
    return "\n\n".join(
        format_table(headers, rows, right=range(1, len(headers)), width=terminal_width())
        for headers, rows in ((first, speeds), (second, costs))
    )


def first_tokens_s(turns: Sequence[Turn]) -> list[float]:
    """Seconds to the first token of all answers."""
    return [one.first_s for turn in turns for one in turn.answers if one.times]


def between_tokens_s(turns: Sequence[Turn]) -> list[float]:
    """Seconds between two tokens, of all answers."""
    return [seconds for turn in turns for one in turn.answers for seconds in one.between_s]


def same_texts(turn: Turn, other: Turn) -> int:
    """Answers with the same text as another contender's in that round."""
    pairs = zip(turn.answers, other.answers, strict=True)
    return sum(one.text.split() == two.text.split() for one, two in pairs)


def _spread(values: Sequence[float], spec: str) -> tuple[str, str]:
    """Median and range."""
    low, high = min(values), max(values)
    return f"{median(values):{spec}}", f"{low:{spec}} - {high:{spec}}"


def _percentiles(seconds: Sequence[float]) -> tuple[str, str]:
    """Median and 95th percentile in milliseconds."""
    if not seconds:
        return "-", "-"
    low, high = np.percentile(seconds, [50, 95]) * 1e3
    return f"{low:.1f} ms", f"{high:.1f} ms"


def problems(turns: Sequence[Turn]) -> list[str]:
    """A line for each contender some of whose answers are not what was asked for."""
    found: dict[str, list[str]] = {}
    for turn in turns:
        found.setdefault(turn.name, []).extend(turn.problems)
    return [
        f"{name}: {len(those)} answers are wrong, the first one: {those[0]}"
        for name, those in found.items()
        if those
    ]


def draw(turns: Sequence[Turn], names: Sequence[str], figure: "Figure") -> LegendContent:
    """How long clients wait for the first token, and for each other: shares of up to a time."""
    servers = {name: [one for one in turns if one.name == name] for name in names}
    servers = {name: those for name, those in servers.items() if those[0].clients_cpu_s is not None}
    looks = looks_of({name: name.partition(", ")[2] or name for name in servers})
    panels = {"first token": first_tokens_s, "between tokens": between_tokens_s}
    for axes, (title, of) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        axes.set_title(title)
        for name, those in servers.items():
            look = line_look(looks[name]) | {"marker": "", "linewidth": 1.4}
            axes.ecdf([max(1e3 * seconds, LEAST_MS) for seconds in of(those)], **look)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlabel("ms")
        axes.grid()
    figure.axes[0].set_ylabel("share of them")
    return LegendContent([(name, legend_entry(looks[name], marker="")) for name in servers])


def run(given: argparse.Namespace) -> None:
    """Measure, and print the table.

    Args:
        given: The options.

    Raises:
        KVPolicyError: An option is wrong, or a contender of kvpolicy fails.
    """
    sizes = {field.name: getattr(given, field.name) for field in attrs.fields(Load)}
    load = attrs.evolve(
        QUICK if given.quick else Load(),
        **{name: size for name, size in sizes.items() if size is not None},
    )
    server_cores, client_cores = choose_cores(given.server_cores, given.client_cores)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpolicy-serving-")))
        vocab_size = save_model(folder / "model", load)
        clients = Child(
            [sys.executable, str(HERE / "serving_clients.py")],
            client_cores,
            folder / "clients.log",
            environment={},
            is_server=False,
        )
        stack.callback(clients.close)
        launcher = Launcher(folder, load, server_cores, stack, clients, given.cpu_weights)
        others: dict[str, Callable[[str], Contender]] = {}
        absent: dict[str, str] = {}
        if not (given.quick or given.without_transformers):
            others[TRANSFORMERS] = launcher.transformers
        if given.vllm_python is not None:
            others[VLLM] = lambda base: launcher.vllm(base, given.vllm_python)
        elif not given.quick:
            absent[VLLM] = "no interpreter was given; give --vllm-python VENV/bin/python"
        usual = {"full": PLANS["full"]} if given.quick else PLANS
        plans = plan_files(given.plan or [], usual, folder)
        contenders, failed = start_all(launcher, plans, others)
        absent |= failed
        for name, reason in absent.items():
            info(f"{name} is left out: {reason}.")
        turns: list[Turn] = []
        total = load.rounds * len(contenders)
        with Progress(total) as progress:
            progress.update("warming up", 0)
            for turn in measure(contenders, load, vocab_size):
                turns.append(turn)
                progress.log(f"round {turn.round}, {turn.name}: {turn.tok_s:.1f} tokens/s")
                progress.update("", len(turns))
    if given.json is not None:
        found = {
            **describe_session(sys.argv, workers=1),
            "load": attrs.asdict(load),
            "cores": {"servers": server_cores, "clients": client_cores},
            "cpu_weights": given.cpu_weights,
            "absent": absent,
            "turns": [attrs.asdict(one) for one in turns],
        }
        atomic_write(given.json, json.dumps(found) + "\n")
    names = [one.name for one in contenders]
    if given.plot is not None:
        size = Size(WIDTHS["page"])
        save_figure([given.plot], size, lambda figure: draw(turns, names, figure))
    print(tables(turns, {one.name: one.base for one in contenders}))
    for line in problems(turns):
        info(line)


def choose_cores(
    servers: Sequence[int] | None, clients: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """The cores of servers and of clients, of which no core is both's.

    Args:
        servers: Those given; ``None``: all that are left, without the last one.
        clients: The same; ``None``: the last one that is left.
    """
    here = sorted(os.sched_getaffinity(0))
    clients = clients or [one for one in here if one not in (servers or ())][-1:]
    servers = servers or [one for one in here if one not in clients]
    if not servers or not clients or {*servers} & {*clients} or not {*servers, *clients} <= {*here}:
        msg = (
            f"servers have the cores {[*servers]} and clients {[*clients]} of {here}; each need "
            "cores of their own: give --server-cores and --client-cores on a machine with two"
        )
        raise KVPolicyError(msg)
    return [*servers], [*clients]


def plan_files(given: Sequence[str], usual: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Plan files by name.

    Args:
        given: The plans that were given, as ``NAME=FILE``, or as a file or an installed plan.
        usual: Contents of the plans if none were given.
        folder: Where these are written.
    """
    if given:
        pairs = [one.partition("=") for one in given]
        return {name if file else Path(name).stem: file or name for name, _, file in pairs}
    files = {name: folder / f"{name}.toml" for name in usual}
    for name, file in files.items():
        file.write_text(usual[name], encoding="utf-8")
    return {name: str(file) for name, file in files.items()}


def main(arguments: list[str] | None = None) -> None:
    """Read the command line."""

    def cores(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def count(text: str) -> int:
        if int(text) < 1:
            raise ValueError
        return int(text)

    def span(text: str) -> tuple[int, int]:
        low, high = map(count, text.split(","))
        if low > high:
            raise ValueError
        return low, high

    parser = argparse.ArgumentParser(description="Throughput of servers.")
    parser.add_argument("--quick", action="store_true", help="small, kvpolicy only: to try it")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--plan", action="append", help="[NAME=]FILE; default: full, snapkv")
    parser.add_argument("--cpu-weights", choices=["plain", "packed"], default="packed")
    parser.add_argument("--shape", help="of the model; default: 100m")
    parser.add_argument("--requests", type=count, help="of a round; default: 32")
    parser.add_argument("--clients", type=count, help="and slots of the engine; default: 16")
    parser.add_argument("--prompt", type=span, help="fewest and most tokens; default: 64,256")
    parser.add_argument("--new", type=span, help="fewest and most tokens; default: 128,256")
    parser.add_argument("--rounds", type=count, help="default: 5")
    parser.add_argument("--server-cores", type=cores, help="default: all but the last")
    parser.add_argument("--client-cores", type=cores, help="default: the last")
    parser.add_argument("--json", type=Path, help="a file for all times")
    parser.add_argument("--plot", type=Path, help="a file for the distributions of waiting times")
    try:
        run(parser.parse_args(arguments))
    except KVPolicyError as error:
        sys.exit(f"serving_throughput: {error}.")


if __name__ == "__main__":
    main()
