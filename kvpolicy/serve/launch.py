"""From a model and plans to a running server."""

import copy
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from kvpolicy.engine.async_engine import AsyncEngine
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.memory.footprint import footprint
from kvpolicy.engine.reuse.store import PrefixStore
from kvpolicy.errors import KVPolicyError, is_out_of_memory
from kvpolicy.model.image_prompts import NO_PROCESSOR, READS_TEXT, chat_template_of
from kvpolicy.plan.plan import Plan
from kvpolicy.quantities import format_bytes
from kvpolicy.serve.engine_log import EngineLog
from kvpolicy.serve.guard import LOOPBACK_HOSTS
from kvpolicy.serve.plans import ServedModel, ServedPlan
from kvpolicy.serve.server import Certificate, Server
from kvpolicy.serve.service import Service
from kvpolicy.serve.settings import ServerSettings


@contextmanager
def bound_to(host: str, port: int) -> Iterator[socket.socket]:
    """A socket at an address, which accepts no connections yet.

    Args:
        host: Name or address of an interface.
        port: The port; 0: a free one.

    Raises:
        KVPolicyError: There is no such interface, or the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    with listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        yield listening


def _cannot_listen(host: str, port: int, error: Exception) -> KVPolicyError:
    reason = getattr(error, "strerror", None) or error
    msg = f"the server cannot listen on {host!r:.60} port {port}: {reason}; give another --port"
    return KVPolicyError(msg)


def socket_url(listening: socket.socket, scheme: str = "http") -> str:
    """The address of a socket as a client writes it.

    Args:
        listening: The socket.
        scheme: How clients talk to it.
    """
    host, port = listening.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def hosts_of(host: str, allowed: Sequence[str]) -> frozenset[str] | None:
    """The names that clients may call a server by; ``None``: any.

    Args:
        host: The interface that it listens on.
        allowed: Names that were given.
    """
    if allowed:
        return frozenset(name.lower() for name in allowed)
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    written = f"[{host}]" if ":" in host else host
    return LOOPBACK_HOSTS | {written} if is_loopback else None


def served_model(
    name: str,
    model: PreTrainedModel,
    tokenizer: Any,
    plans: Mapping[str, Plan],
    settings: ServerSettings,
    *,
    max_waiting: int,
    kv_memory: int | None = None,
    prefix_store: PrefixStore | None = None,
    aliases: Sequence[str] = (),
    processor: Any = None,
    lacks_processor: bool = False,
    **engine_options: Any,
) -> ServedModel:
    """Build an engine for each plan; all of them have the weights of one model.

    Args:
        name: What clients call the model.
        model: The model.
        tokenizer: Its tokenizer.
        plans: The plans by name.
        settings: What clients may ask for.
        max_waiting: Requests that may wait for a slot of each plan.
        kv_memory: Bytes for the caches of all plans, in equal parts; ``None``: as the number of
            slots says.
        prefix_store: What all plans reuse; ``None``: nothing.
        aliases: Further names of the model.
        processor: What prepares the images of chats, see `processor_for`; its chat template is
            that of all chats.
        lacks_processor: Whether the model takes images, and its processor cannot be loaded.
        engine_options: Further arguments of `Engine`.

    Raises:
        KVPolicyError: A plan does not fit the model, or not one sequence the memory.
    """
    template = chat_template_of(processor)
    if template is not None and template != tokenizer.chat_template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    served = []
    for plan_name, plan in plans.items():
        engine = Engine(
            model,
            tokenizer,
            plan,
            on_hook_error="answer",
            prefix_store=prefix_store,
            **engine_options,
        )
        max_len, max_prompt_len = _lengths(engine.adapter.max_positions, settings)
        log = EngineLog(plan_name)
        try:
            running = AsyncEngine(
                engine,
                max_len=max_len,
                max_prompt_len=max_prompt_len,
                kv_memory=None if kv_memory is None else kv_memory // len(plans),
                max_waiting=max_waiting,
                listener=log,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise _too_large(plan_name, engine, max_len, max_prompt_len) from error
        model_id = name if len(plans) == 1 else f"{name}:{plan_name}"
        most = running.stats.slots + max_waiting
        served.append(
            ServedPlan(plan_name, model_id, engine, running, log, max_len, max_prompt_len, most)
        )
    no_images = NO_PROCESSOR if lacks_processor else READS_TEXT
    return ServedModel(name, tokenizer, served, prefix_store, aliases, processor, no_images)


def _too_large(plan: str, engine: Engine, max_len: int, max_prompt_len: int) -> KVPolicyError:
    wanted = footprint(
        engine.plan,
        engine.adapter,
        slots=engine.num_slots,
        longest=max_len,
        longest_prompt=max_prompt_len,
        max_tokens_per_forward=engine.max_tokens_per_forward,
    )
    msg = (
        f"plan '{plan}' needs {format_bytes(wanted.num_bytes)} for {engine.num_slots} sequences of "
        f"up to {max_len:,} tokens, and there is not so much memory; give --max-prompt-tokens with "
        "--max-new-tokens for shorter ones, fewer --slots, --kv-memory BYTES for as many as fit, "
        "or a smaller --budget"
    )
    return KVPolicyError(msg)


def _lengths(positions: int, settings: ServerSettings) -> tuple[int, int]:
    """The most tokens of a sequence, and of a prompt."""
    max_len = positions
    if settings.max_prompt_tokens is not None and settings.max_new_tokens is not None:
        max_len = min(settings.max_prompt_tokens + settings.max_new_tokens, positions)
    return max_len, min(settings.max_prompt_tokens or max_len, max_len - 1)


def serve_model(
    served: ServedModel,
    settings: ServerSettings,
    listening: socket.socket,
    on_start: Callable[[str], None],
    certificate: Certificate | None = None,
) -> int:
    """Serve until a signal stops it.

    Args:
        served: The model.
        settings: What clients may ask for.
        listening: A bound socket.
        on_start: Called with the address when connections are accepted.
        certificate: The server speaks TLS with it; ``None``: it does not.

    Returns:
        Requests that were cancelled at the end.
    """
    url = socket_url(listening, "http" if certificate is None else "https")
    server = Server(Service(served, settings), lambda: on_start(url), certificate)
    server.run([listening])
    return server.num_cancelled
