"""How long an answer is fresh: the TTL policy of PROTOCOL.md section 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Rule:
    """Models whose id starts with ``prefix``: fresh for ``ttl_s``, and never longer than ``max_ttl_s``, whoever says so."""

    prefix: str
    ttl_s: float
    max_ttl_s: float = math.inf


@dataclass(frozen=True, slots=True)
class TTLPolicy:
    """One version of the policy. To change it, put another in its place: a reference is swapped atomically."""

    version: int = 0
    rules: tuple[Rule, ...] = ()
    default_ttl_s: float | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> TTLPolicy:
        """From its JSON form. ``ProtocolError`` says what is wrong with it; a half-understood policy is not used."""
        try:
            rules = tuple(
                Rule(
                    _text(rule["prefix"], "prefix"),
                    _seconds(rule["ttl_s"], "ttl_s"),
                    _seconds(rule.get("max_ttl_s", math.inf), "max_ttl_s"),
                )
                for rule in data.get("rules", ())
            )
            default = data.get("default_ttl_s")
            if type(data["version"]) is not int:
                raise ProtocolError(f"a TTL policy's version is an integer; got {data['version']!r}")
        except (KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"not a TTL policy (PROTOCOL.md section 4): {error!r}") from error
        return cls(data["version"], rules, None if default is None else _seconds(default, "default_ttl_s"))

    def rule_for(self, model: str) -> Rule | None:
        """The rule with the longest prefix of the model's id."""
        fitting = [rule for rule in self.rules if model.startswith(rule.prefix)]
        return max(fitting, key=lambda rule: len(rule.prefix), default=None)

    def ttl_s(self, model: str, *, call: float | None, server: float | None, default: float) -> float:
        """Seconds that an answer of ``model`` is fresh; 0 is not at all.

        The call's own TTL counts, else the server's ``Cache-Control``, else the policy's (its rule, else its default), else
        the client's ``default``. The rule's maximum caps all of them.
        """
        rule = self.rule_for(model)
        of_policy = rule.ttl_s if rule is not None else self.default_ttl_s
        said = (ttl for ttl in (call, server, of_policy, default) if ttl is not None)
        return max(0.0, min(next(said), rule.max_ttl_s if rule is not None else math.inf))


def _seconds(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ProtocolError(f"a TTL policy's {name} is a number of seconds ≥ 0; got {value!r}")
    return float(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"a TTL policy's {name} is text; got {value!r}")
    return value
