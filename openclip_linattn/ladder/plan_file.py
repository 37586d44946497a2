"""Reads a plan from a YAML file; what is wrong with it is said by file and key."""

import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from openclip_linattn.errors import UserError
from openclip_linattn.ladder.places import Section
from openclip_linattn.ladder.schema import Spec

Model = TypeVar("Model", bound=BaseModel)
_INT, _FLOAT, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "merge"))


class _Loader(yaml.SafeLoader):
    """YAML as people read it: 1e-3 is a number, 24:00:00 is none, and a key that is there twice is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} is there twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


_DIGITS = r"[0-9](_?[0-9])*"
_Loader.add_implicit_resolver(_INT, re.compile(rf"[-+]?{_DIGITS}$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(rf"[-+]?({_DIGITS}\.([0-9_]*)|\.[0-9]+|{_DIGITS}(?=[eE]))([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def read_spec(path: Path) -> Spec:
    """The content of a plan. Raises UserError where it cannot be read, or for a key or value that is not right."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold the keys of a plan: {', '.join(Spec.model_fields)}")
    return validated(Spec, content, str(path))


def validated(model: type[Model], content: dict[str, Any], file: str, prefix: str = "") -> Model:
    """`content` as a section of the plan in `file`, where its keys have a prefix.

    Raises UserError, a sentence for each thing that is wrong.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise UserError("\n".join(_sentences(error, model, file, prefix))) from error


def _sentences(error: ValidationError, model: type[BaseModel], file: str, prefix: str) -> Iterator[str]:
    for each in error.errors():
        key = prefix + ".".join(map(str, each["loc"]))
        yield f"{file}: {key + ': ' if key else ''}{_reason(each, model)}"


def _reason(error: ErrorDetails, model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        return f"there is no such key; the keys here are {', '.join(_keys(model, error['loc'][:-1]))}"
    if error["type"] == "missing":
        return "the key is missing"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    message = error["msg"]
    return f"{message[0].lower()}{message[1:]}, not {error['input']!r}"


def _keys(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The keys of the section at a place in a plan."""
    for part in place:
        field = model.model_fields.get(str(part))
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), model)
    return list(model.model_fields)
