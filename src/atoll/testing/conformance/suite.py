"""The suite: each case with what it needs of a driver. Skipping goes by declaration, never by a driver's name."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import ModuleType

from atoll.drivers.port import Capabilities
from atoll.testing.conformance import keeping, layers, life, limits, network, pausing, saving
from atoll.testing.conformance.stand import Stand


@dataclass(frozen=True, slots=True)
class Case:
    """One promise of the port."""

    name: str
    run: Callable[[Stand], Awaitable[None]]
    needs: tuple[str, ...]
    """Flags of Capabilities that must be true."""


def _cases(module: ModuleType, needs: dict[str, tuple[str, ...]], default: tuple[str, ...]) -> list[Case]:
    return [
        Case(name, function, needs.get(name, default))
        for name, function in vars(module).items()
        if inspect.iscoroutinefunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    ]


_LIFE_NEEDS = {
    "a_running_guest_survives_its_driver": ("survives_agent",),
    "a_running_guest_survives_a_close": ("survives_agent",),
    "a_kept_disk_is_found_again": ("stop_keeps_disk", "guest_handshake"),
    "the_guest_is_who_was_ordered": ("guest_handshake",),
    "what_runs_is_measured_and_nothing_else": ("metered",),
}

_PAUSING_NEEDS = {
    "a_frozen_guest_survives_its_driver": ("pauses", "survives_agent"),
    "a_frozen_guest_does_nothing_and_then_goes_on": ("pauses", "guest_handshake"),
    "a_frozen_guest_uses_no_cpu": ("pauses", "guest_handshake", "real_kernel_limits"),
    "connections_outlast_a_pause": ("pauses", "guest_handshake"),
}

_SAVING_NEEDS = {
    "what_is_saved_is_at_rest_until_it_is_restored": ("saves_files",),
    "what_a_guest_leaves_goes_behind_its_save": ("saves_files", "network_slots"),
    "saving_and_restoring_can_be_repeated": ("saves_files",),
    "what_is_saved_is_removed": ("saves_files",),
    "what_was_saved_survives_its_driver": ("saves_files", "survives_agent"),
    "what_is_not_there_cannot_be_saved": ("saves_files",),
    "memory_and_files_are_of_one_moment": ("saves_memory", "guest_handshake"),
    "twenty_cycles_lose_nothing": ("saves_memory", "guest_handshake"),
    "a_frozen_guest_is_saved": ("saves_memory", "guest_handshake", "pauses"),
    "restored_guests_have_other_chance": ("saves_memory", "guest_handshake"),
    "connections_within_a_guest_outlast_a_suspend": ("saves_memory", "guest_handshake"),
    "connections_are_cut_when_the_address_changes": ("saves_memory", "guest_handshake", "network_slots"),
    "peers_outside_are_reset_when_the_address_changes": ("saves_memory", "guest_handshake", "network_slots"),
}

_KEEPING_NEEDS = {
    "a_guest_goes_on_while_it_is_kept": ("snapshots",),
    "what_is_kept_outlives_its_guest_and_its_driver": ("snapshots",),
    "who_has_begun_comes_back_without_what_it_began_from": ("snapshots", "saves_files"),
    "two_at_once_and_a_removal_meanwhile_are_borne": ("snapshots",),
    "what_is_not_kept_begins_nothing": ("snapshots",),
    "what_is_frozen_or_saved_is_not_kept": ("snapshots", "pauses", "saves_files"),
    "clones_go_on_where_their_parent_was": ("snapshots", "saves_memory", "guest_handshake"),
}

CASES: tuple[Case, ...] = (
    *_cases(life, _LIFE_NEEDS, ()),
    *_cases(layers, {}, ("layers", "guest_handshake")),
    *_cases(limits, {}, ("real_kernel_limits", "guest_handshake")),
    *_cases(pausing, _PAUSING_NEEDS, ("pauses",)),
    *_cases(saving, _SAVING_NEEDS, ("saves_files", "guest_handshake")),
    *_cases(keeping, _KEEPING_NEEDS, ("snapshots", "guest_handshake")),
    *_cases(network, {}, ("network_slots", "guest_handshake")),
)


def cases_for(capabilities: Capabilities) -> tuple[list[Case], list[Case]]:
    """(what a driver must pass, what its declaration leaves out)."""
    wanted = [case for case in CASES if all(getattr(capabilities, flag) for flag in case.needs)]
    return wanted, [case for case in CASES if case not in wanted]


def lacking(case: Case, capabilities: Capabilities) -> list[str]:
    """The flags that a case needs and a driver does not declare."""
    return [flag for flag in case.needs if not getattr(capabilities, flag)]
