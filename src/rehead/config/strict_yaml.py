"""A strict YAML: no code, no tags, no references, no duplicate keys, and 5e-4 is a number."""

import re
from typing import Any, NoReturn

import yaml

FLOAT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
"""Numbers such as 5e-4, which YAML 1.1 reads as text."""
PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates: a pair is one character, and half a pair none, but U+DC80 to U+DCFF may stand for bytes of a path."""

MOST_BITS = 10_000


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self._refuse("a reference", event)
        if event.tag is not None:
            self._refuse(f"a tag ({event.tag!s:.40})", event)
        return super().compose_node(parent, index)

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Join pairs of surrogates, with which JSON escapes a character beyond U+FFFF.

        Half a pair is refused, but for those that Python has for a byte of a path that is not UTF-8.
        """
        node = super().compose_scalar_node(anchor)
        node.value = PAIR.sub(
            lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), node.value
        )
        if HALF.search(node.value):
            raise yaml.composer.ComposerError(
                problem="half a pair of surrogates, which is no character; write the character itself",
                problem_mark=node.start_mark,
            )
        return node

    def _refuse(self, what: str, event: Any) -> NoReturn:
        raise yaml.composer.ComposerError(
            problem=f"{what}; write the value itself", problem_mark=event.start_mark
        )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            raise yaml.constructor.ConstructorError(
                problem="a key appears twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Refuse a number that Python would not print: in other bases than 10 it reads longer ones."""
        value = int(super().construct_yaml_int(node))
        if value.bit_length() > MOST_BITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a whole number of {value.bit_length():,} bits", node.start_mark
            )
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


class OddNumber(yaml.constructor.ConstructorError):
    """A number that YAML 1.1 reads as another one: 010 is 8, 1:30 is 90, 1_000 is 1000."""


class _PlainLoader(_Loader):
    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = super().construct_yaml_int(node)
        if not re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", node.value):
            self._refuse_odd(node)
        return value

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        if ":" in node.value or "_" in node.value:
            self._refuse_odd(node)
        return float(super().construct_yaml_float(node))

    def _refuse_odd(self, node: yaml.ScalarNode) -> NoReturn:
        raise OddNumber(None, None, f"{node.value:.40}; write the number in plain digits", node.start_mark)


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)
_PlainLoader.add_constructor("tag:yaml.org,2002:float", _PlainLoader.construct_yaml_float)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _PlainLoader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def parse(text: str, *, plain: bool = True) -> Any:
    """Parse YAML without tags, references or duplicate keys and, if `plain`, with numbers in plain digits only.

    Raises yaml.YAMLError for anything else.
    """
    try:
        return (_PlainLoader if plain else _Loader)(text).get_single_data()
    except (ValueError, RecursionError) as error:  # an invalid date, too many digits, too deep
        raise yaml.YAMLError(str(error)) from error


def dump(value: Any) -> str:
    """Return plain values as YAML that `parse` accepts."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def first_line(error: Exception) -> str:
    """Return an error in one line, with the line number in the file."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
