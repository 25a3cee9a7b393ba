"""``kvpolicy serve``: a server with OpenAI's interface for one model under one or several plans.

Standard output has the address and a line to try; standard error the log, a line for each request.
"""

import os
import re
import sys
from collections.abc import Sequence
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.option_groups import with_groups
from kvpolicy.cli.options import (
    DEFAULT_MODEL,
    MODEL,
    POLICY,
    SOME_FAILED,
    DecoderOptions,
    PolicyOptions,
    Where,
    choose_plan,
    examples,
    register_plugins,
    tell_no_effects,
)
from kvpolicy.cli.output import info, print_lines
from kvpolicy.cli.prefix_options import PrefixOptions, prefix_store
from kvpolicy.entry_points import default_name
from kvpolicy.errors import KVPolicyError
from kvpolicy.extras import install_extra
from kvpolicy.quantities import format_count, parse_bytes
from kvpolicy.serve.settings import KEYS

if TYPE_CHECKING:
    from kvpolicy.plan.plan import Plan
    from kvpolicy.serve.plans import ServedModel
    from kvpolicy.serve.settings import ServerSettings

app = typer.Typer(
    help="Serve a model under one or several plans, with OpenAI's interface.",
    rich_help_panel="Generate text",
    add_completion=False,
)

NETWORK, LIMITS, RAY = "Network", "Limits", "Several machines"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_OF_NAME = 256  # characters, as in bodies
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@,]+")


class LogFormat(Enum):
    """How lines of the log are written."""

    text = "text"
    json = "json"


@app.command(
    epilog=examples(
        "kvpolicy serve",
        "kvpolicy serve --plan h2o=h2o.toml --plan rkv=rkv.toml --kv-memory 2GiB",
        "kvpolicy serve --on ray --replicas 4",
    )
)
@with_groups
def serve(
    plan: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FILE|PRESET",
            help="A plan, which clients choose as MODEL:NAME; may be repeated. The first one is "
            "chosen by MODEL alone.",
            rich_help_panel=POLICY,
        ),
    ] = None,
    *,
    policies: PolicyOptions,
    decoder: DecoderOptions,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What clients call the model; further ones are aliases. [default: as --model, or "
            "the last part of a folder's path]",
            rich_help_panel=MODEL,
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences decoded together, of each plan. [default: 8]",
            rich_help_panel=MODEL,
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Memory for the caches of all plans, such as 2GiB, from which the number of slots "
            "follows.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    max_tokens_per_forward: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Prompt tokens computed between two decode steps, at most: so long a running "
            "answer waits for its next token while prompts of others enter. [default: 8192]",
            rich_help_panel=MODEL,
        ),
    ] = None,
    prefix: PrefixOptions,
    host: Annotated[
        str, typer.Option(help="Interface to listen on.", rich_help_panel=NETWORK)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: a free one.", rich_help_panel=NETWORK)
    ] = 8000,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name by which clients call the server; may be repeated. [default: on the "
            "loopback interface its names, otherwise any]",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help=f"A key that clients must send; may be repeated. Others see it in the list of "
            f"processes: better set {KEYS}, to one key or several with spaces between.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Pages of this origin, such as https://chat.example.com, may call the server from "
            "a browser; may be repeated. *: any page.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Speak TLS with this certificate, in PEM.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Its private key, unless it is in the same file.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    max_waiting: Annotated[
        int,
        typer.Option(
            min=0,
            help="Requests that may wait for a slot, of each plan; others are refused with 429.",
            rich_help_panel=LIMITS,
        ),
    ] = 64,
    max_body: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Largest body of a request.", rich_help_panel=LIMITS),
    ] = "2MiB",
    max_pixels: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Most pixels of the images of a request, together.",
            rich_help_panel=LIMITS,
        ),
    ] = 32 << 20,
    max_requests: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests answered at the same time; others are refused with 429.",
            rich_help_panel=LIMITS,
        ),
    ] = 256,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest prompt. [default: what the model has positions for]",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens that a request may ask for. [default: what the model has positions "
            "for]",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    request_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="After this time, a request ends with 504.",
            rich_help_panel=LIMITS,
        ),
    ] = 600.0,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Time for what runs to end, after SIGTERM or Ctrl-C.",
            rich_help_panel=LIMITS,
        ),
    ] = 30.0,
    log_format: Annotated[
        LogFormat, typer.Option(help="Text or JSON lines, on standard error.")
    ] = LogFormat.text,
    on: Annotated[
        Where,
        typer.Option(help="Serve on this machine, or on a Ray cluster.", rich_help_panel=RAY),
    ] = Where.here,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|auto",
            help="The cluster. [default: RAY_ADDRESS, or a new one on this machine]",
            rich_help_panel=RAY,
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Copies of the model. [default: 1]", rich_help_panel=RAY),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With more requests, up to so many. [default: as --replicas]",
            rich_help_panel=RAY,
        ),
    ] = None,
    requests_per_replica: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests that a replica takes at a time; others go to another one. [default: "
            "twice its slots]",
            rich_help_panel=RAY,
        ),
    ] = None,
    cpus_per_replica: Annotated[
        int | None,
        typer.Option(
            min=1, help="CPUs and threads of a replica. [default: 1]", rich_help_panel=RAY
        ),
    ] = None,
    gpus_per_replica: Annotated[
        float | None,
        typer.Option(
            min=0, help="GPUs of a replica. [default: 1 where there are any]", rich_help_panel=RAY
        ),
    ] = None,
    write_deployment: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Serve nothing; write a file for Ray's serve deploy instead.",
            rich_help_panel=RAY,
        ),
    ] = None,
) -> None:
    """Serve a model under one or several plans, with OpenAI's interface.

    Without options: the default model, on this machine only. Ctrl-C or SIGTERM lets what runs
    end, a second one ends it.
    """
    _check_installed()
    given = {
        "--ray-address": ray_address,
        "--replicas": replicas,
        "--max-replicas": max_replicas,
        "--requests-per-replica": requests_per_replica,
        "--cpus-per-replica": cpus_per_replica,
        "--gpus-per-replica": gpus_per_replica,
    }
    is_on_ray = on is Where.ray or write_deployment is not None
    for option, value in given.items():
        if value is not None and not is_on_ray:
            msg = f"{option} applies to a server on Ray only; add --on ray, or remove it."
            raise KVPolicyError(msg)
    if slots is not None and kv_memory is not None:
        msg = "--slots and --kv-memory were given; give one of them."
        raise KVPolicyError(msg)
    of_store = prefix.arguments()
    if prefix.prefix_spill is not None and is_on_ray:
        msg = (
            "--prefix-spill was given for a server on Ray, whose replicas cannot share a folder; "
            "remove it, or serve on this machine without --on ray."
        )
        raise KVPolicyError(msg)
    if ssl_certfile is not None and is_on_ray:
        msg = (
            "--ssl-certfile was given for a server on Ray, which speaks no TLS; put a proxy before "
            "it, or serve on this machine without --on ray."
        )
        raise KVPolicyError(msg)
    if ssl_keyfile is not None and ssl_certfile is None:
        msg = "--ssl-keyfile was given without --ssl-certfile; give both."
        raise KVPolicyError(msg)
    memory = None if kv_memory is None else parse_bytes("--kv-memory", kv_memory)
    largest_body = parse_bytes("--max-body", max_body)
    keys = _keys(api_key)
    register_plugins(policies.plugin)
    model = decoder.name
    plans = _plans(plan or [], policies, model)
    names = _names(served_model_name or [model_name(model)], [*plans])
    from kvpolicy.engine.bound_plan import DEFAULT_MAX_TOKENS
    from kvpolicy.engine.engine import DEFAULT_SLOTS
    from kvpolicy.model.image_prompts import processor_for
    from kvpolicy.serve.launch import bound_to, hosts_of, serve_model, served_model
    from kvpolicy.serve.logs import logging_to
    from kvpolicy.serve.server import Certificate
    from kvpolicy.serve.settings import ServerSettings

    certificate = None if ssl_certfile is None else Certificate(ssl_certfile, ssl_keyfile)
    settings = ServerSettings(
        api_keys=keys,
        origins=_origins(allow_origin or []),
        hosts=hosts_of(host, allowed_host or []),
        max_body=largest_body,
        max_pixels=max_pixels,
        max_requests=max_requests,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        request_timeout_s=request_timeout,
        shutdown_timeout_s=shutdown_timeout,
    )
    options: dict[str, Any] = {
        "compile": decoder.compile,
        "max_waiting": max_waiting,
        "kv_memory": memory,
        "slots": slots or DEFAULT_SLOTS,
        "max_tokens_per_forward": max_tokens_per_forward or DEFAULT_MAX_TOKENS,
    }
    if is_on_ray:
        from kvpolicy.serve.on_ray.command import RayOptions, serve_on_ray

        if of_store is not None:
            prefix_store(of_store)  # what is wrong is found before the cluster
        serve_on_ray(
            names,
            model,
            decoder.loading,
            plans,
            options,
            settings,
            RayOptions(
                ray_address,
                replicas or 1,
                max_replicas,
                requests_per_replica,
                cpus_per_replica or 1,
                gpus_per_replica,
            ),
            prefix_store=of_store,
            host=host,
            port=port,
            json_logs=log_format is LogFormat.json,
            output=write_deployment,
        )
        return
    with (
        logging_to(sys.stderr, as_json=log_format is LogFormat.json),
        bound_to(host, port) as listening,
    ):
        # A port that is taken and a store that cannot be made are found before the model.
        store = prefix_store(of_store)
        loaded, tokenizer = decoder.load()
        remote = decoder.loading["trust_remote_code"]
        processor, problem = processor_for(loaded, model, trust_remote_code=remote)
        if problem:
            info(f"messages may have no images: {problem}.")
        served = served_model(
            names[0],
            loaded,
            tokenizer,
            plans,
            settings,
            prefix_store=store,
            aliases=names[1:],
            processor=processor,
            lacks_processor=bool(problem),
            **options,
        )
        for offered in served.plans:
            tell_no_effects(offered.engine.plan, whose=f"{offered.id}: ")
        _warn_if_open(settings, host)
        num_cancelled = serve_model(
            served,
            settings,
            listening,
            lambda url: print_lines(_welcome(served, url, settings)),
            certificate,
        )
    if num_cancelled:
        raise typer.Exit(SOME_FAILED)


def model_name(model: str) -> str:
    """What clients call a model: its name or hub id, or the name of its folder.

    A folder has the name that it was given by, also where that is a link.

    Args:
        model: ``--model``.
    """
    return Path(os.path.abspath(model)).name if Path(model).is_dir() else model


def _check_installed() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if not find_spec(name)]
    if missing:
        msg = (
            f"kvpolicy serve needs {', '.join(missing)}; install the extra: "
            f"{install_extra('serve')}"
        )
        raise KVPolicyError(msg)


def _names(given: Sequence[str], plans: Sequence[str]) -> list[str]:
    """The names of a model; each id that a client may give for it is one of them only."""
    for name in given:
        if not name.strip() or not name.isprintable() or len(name) > _MOST_OF_NAME:
            msg = (
                f"--served-model-name was given {name!r:.60}; give up to {_MOST_OF_NAME} printable "
                "characters."
            )
            raise KVPolicyError(msg)
    of_plans = [f"{name}:{plan}" for name in given for plan in plans] if len(plans) > 1 else []
    ids = [*given, *of_plans]
    twice = next((one for number, one in enumerate(ids) if one in ids[:number]), None)
    if twice is not None:
        msg = f"--served-model-name would have two models called '{twice:.60}'; give another name."
        raise KVPolicyError(msg)
    return list(given)


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """The origins of ``--allow-origin``, as browsers send them."""
    for origin in given:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            msg = (
                f"--allow-origin was given {origin!r:.60}; give SCHEME://HOST or "
                "SCHEME://HOST:PORT without a path, such as https://chat.example.com, or *."
            )
            raise KVPolicyError(msg)
    return tuple(origin.lower() for origin in given)


def _keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """The keys of ``--api-key``, or else of the environment."""
    keys = tuple(given or os.environ.get(KEYS, "").split())
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
        msg = "a key was given that no header can hold; give letters, digits and marks of ASCII."
        raise KVPolicyError(msg)
    return keys


def _plans(given: Sequence[str], options: PolicyOptions, model: str) -> "dict[str, Plan]":
    """The plans by their names, in the order in which they were given."""
    is_default = not (given or options.are_given)
    usual = default_name("plan") if is_default and model == DEFAULT_MODEL else None
    plans: dict[str, Plan] = {}
    for text in given or ([usual] if usual else []):
        name, file = _named(text)
        if name in plans:
            msg = f"two plans are named '{name}'; give one of them another: --plan NAME={file}"
            raise KVPolicyError(msg)
        plans[name] = choose_plan(Path(file), options)
    if not plans:
        policies = "-".join(options.policy or []).replace("+", "-")
        plans[policies or default_name("policy") or "plan"] = choose_plan(None, options)
    return plans


def _named(text: str) -> tuple[str, str]:
    """A plan's name and its file or preset, of ``NAME=FILE`` or ``FILE``."""
    name, equals, file = text.partition("=")
    if equals and _NAME.fullmatch(name):
        return name, file
    name = Path(text).stem if text.endswith(".toml") else text
    if not _NAME.fullmatch(name):
        msg = (
            f"the plan {text!r:.60} needs a name of letters, digits, '.', '_' and '-': give "
            "--plan NAME=FILE"
        )
        raise KVPolicyError(msg)
    return name, text


def _warn_if_open(settings: "ServerSettings", host: str) -> None:
    if settings.hosts is None and not settings.api_keys:
        info(f"everybody who reaches {host} may use this server; set {KEYS} to ask for a key.")


def _welcome(served: "ServedModel", url: str, settings: "ServerSettings") -> list[str]:
    """Where the server is, and a line to try."""
    from kvpolicy.serve.example import curl_line, example_request

    plans = [
        f"  {plan.id}: up to {format_count(plan.stats.slots, 'sequence')} of {plan.max_len:,} "
        "tokens together"
        for plan in served.plans
    ]
    request = example_request(served, settings.max_new_tokens)
    line = curl_line(url, request, KEYS if settings.api_keys else None)
    return [f"{served.name} is served at {url}", *plans, "", "Open it in a browser, or try:", line]
