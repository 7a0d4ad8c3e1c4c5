"""What the fake service keeps warm: policies alone, since it has no guests that would have to be made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.base.errors import Code, Refused
from atoll.control.service import Caller, WarmView
from atoll.domain.template import Template
from atoll.domain.warmth import WarmPolicy
from atoll.planning.resolve import CreateRequest


@dataclass(slots=True)
class FakeWarmth:
    """In memory, by kind."""

    _kept: dict[tuple[str, str, int, int, int], WarmView] = field(default_factory=dict)

    def all(self, caller: Caller) -> Sequence[WarmView]:
        """As Service.warm_policies."""
        _operator(caller)
        return list(self._kept.values())

    def put(self, caller: Caller, template: Template, request: CreateRequest, *, count: int, now: float) -> WarmView:
        """As Service.keep_warm."""
        _operator(caller)
        size = (
            request.cpu_millis or template.cpu_millis,
            request.memory_mib or template.memory_mib,
            request.disk_mib or template.disk_mib,
        )
        policy = WarmPolicy(template.id, request.class_name or "default", *size, count, updated_at=now)
        view = WarmView(policy, template.name, count, 0)
        self._kept.pop(policy.kind, None)
        if count:
            self._kept[policy.kind] = view
        return view


def _operator(caller: Caller) -> None:
    if not caller.operator:
        raise Refused(Code.FORBIDDEN, "what is kept warm is the operator's")
