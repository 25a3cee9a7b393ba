"""What the processes of a server on several machines are given, as plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import cattrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.executors.process_setup import ProcessSetup
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.spec import PolicySpec
from kvpolicy.serve.settings import ServerSettings


@attrs.frozen
class ServeConfig:
    """A model, its plans and the limits of a server: the same for all replicas and the router.

    Attributes:
        name: What clients call the model.
        model: Its name, hub id or folder.
        loading: Further arguments of `load_model`.
        plans: The contents of the plans' files, by their names.
        engine: Further arguments of `served_model`.
        settings: What clients may ask for. Keys are not part of it.
        needs_key: Whether the router refuses to start without keys in its environment.
        json_logs: Whether lines of the log are JSON.
        requests: Requests that a replica takes at a time, those that wait in it included.
        setup: How the processes are set up.
        prefix_store: Arguments of the `PrefixStore` that each replica has for itself; ``None``: it
            has none.
        aliases: Further names of the model.
    """

    name: str
    model: str
    loading: dict[str, Any]
    plans: dict[str, dict[str, Any]]
    engine: dict[str, Any]
    settings: ServerSettings
    needs_key: bool
    json_logs: bool
    requests: int
    setup: ProcessSetup
    prefix_store: dict[str, Any] | None = None
    aliases: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, such as for YAML; without keys.

        Raises:
            KVPolicyError: A plugin is no text.
        """
        try:
            data: dict[str, Any] = _CONVERTER.unstructure(self)
        except UnicodeDecodeError as error:
            msg = "a file given with --plugin is not UTF-8, as Python files are"
            raise KVPolicyError(msg) from error
        del data["settings"]["api_keys"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ServeConfig":
        """The configuration of such data.

        Raises:
            KVPolicyError: It is none.
        """
        try:
            return _CONVERTER.structure(data, cls)
        except (cattrs.BaseValidationError, KeyError, TypeError, ValueError) as error:
            what = "; ".join(cattrs.transform_error(error))
            msg = (
                f"args of the deployment are not those that kvpolicy serve writes: {what:.300}; "
                "write the file again with --write-deployment"
            )
            raise KVPolicyError(msg) from error

    def read_plans(self) -> dict[str, Plan]:
        """The plans by their names.

        Raises:
            PlanError: One is wrong.
        """
        return {
            name: Plan.from_dict(data, name=f"plan '{name}'") for name, data in self.plans.items()
        }


def plan_data(plan: Plan) -> dict[str, Any]:
    """The contents of a plan's file, for `Plan.from_dict`.

    Args:
        plan: A plan whose policies are given by name.
    """
    return {key: value for key, value in _plain(plan).items() if key not in _NOT_IN_FILES}


_NOT_IN_FILES = ("name", "sources", "options")


def _plain(value: Any) -> Any:
    if isinstance(value, PolicySpec):
        return _plain(value.to_dict())
    if attrs.has(type(value)):
        given = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
        return {key: _plain(one) for key, one in given.items() if one not in (None, ())}
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(bytes, lambda content: content.decode())
    converter.register_structure_hook(bytes, lambda text, _: str(text).encode())
    converter.register_unstructure_hook_func(
        lambda kind: kind == frozenset[str] | None, lambda names: names and sorted(names)
    )
    converter.register_structure_hook(
        frozenset[str] | None, lambda names, _: None if names is None else frozenset(names)
    )
    return converter


_CONVERTER = _converter()
