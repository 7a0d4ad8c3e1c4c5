"""The deployment document: everything wrong with it is said with its line, and what is right means one thing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.domain.deployment import (
    BuildLimits,
    ClientLimits,
    Deployment,
    DeploymentLimits,
    Range,
    Rate,
    TeamLimits,
    WorkloadClass,
)
from atoll.domain.spec import Ingress, Isolation, OnLeaseExpiry, OnLoss, PlacementPolicy
from atoll.wire import document, normal_form
from atoll.wire.deployment import read
from atoll.wire.document import NotADocument

CLASSES = "classes:\n  ci: {}\n"


def problems(text: str) -> list[tuple[int, str, str]]:
    with pytest.raises(NotADocument) as refused:
        read(text)
    return [(one.line, one.path, one.message) for one in refused.value.problems]


def test_the_built_in_document_means_the_built_in_deployment() -> None:
    assert read(normal_form.BUILT_IN) == Deployment()


def test_what_is_left_out_is_as_in_the_built_in_document() -> None:
    meant = read("version: 1\n" + CLASSES)
    assert meant.classes == {"ci": WorkloadClass(name="ci")}
    assert meant.default_class == "ci"
    assert (meant.client, meant.team, meant.deployment) == (ClientLimits(), TeamLimits(), DeploymentLimits())
    assert meant.builds == BuildLimits()


def test_the_example_of_the_manual_is_a_document() -> None:
    manual = (Path(__file__).resolve().parents[3] / "docs" / "DEPLOYMENT.md").read_text()
    meant = read(manual.partition("```yaml\n")[2].partition("```")[0])
    assert (meant.default_class, list(meant.classes), meant.of_team("ci").sandboxes) == ("default", ["default", "ci"], 2000)
    assert meant.classes["ci"].on_loss is OnLoss.REPLACE


def test_every_key_is_taken_in() -> None:
    meant = read("""
version: 1
default_class: ci
limits:
  client: {request_rate: 600/m, burst: 7, sandboxes: 5}
  team: {request_rate: unlimited, sandboxes: 50, records: 500, registry: 10GiB}
  deployment: {request_rate: 1000/s, sandboxes: unlimited, records: unlimited, registered_hosts: 9, active_hosts: 8}
builds: {whole: 2h, step: 90m, start: 5m}
registry: {public: [acme/app, acme/tools/*]}
teams:
  acme: {sandboxes: 60, registry: unlimited}
  Größe und Söhne: {records: 1000}
classes:
  ci:
    description: "Jobs"
    isolation: shared-kernel
    template: tools
    templates: [tools, acme/base:default]
    size:
      cpu: {min: 100m, max: 4, default: 1.5}
      memory: {min: 64MiB, max: 8GiB, default: 0.5GiB}
      disk: {min: 1GiB, max: 1TiB}
      processes: 99
    lifetime: {default: 90s, max: 2h}
    timeouts: {reserve: 1s, image: 2s, guest_ready: 3s, start: 7s, bootstrap: 4s, release: 5s, no_capacity: 6s, patience: 250ms}
    attempts: 1
    ingress: token
    internet: false
    arch: aarch64
    regions: [no, eu-1]
    labels: {disk: ssd, "gpu.vendor/model": "7"}
    placement: {policy: spread, choices: 3}
    on_exit: release
    on_lease_expiry: keep
    on_loss: replace
    requests: {metadata_pairs: 1, metadata_bytes: 2, environment_pairs: 3, environment_bytes: 4}
""")
    assert meant.client == ClientLimits(Rate(10.0, 7.0), 5)
    assert meant.team == TeamLimits(None, 50, 500, 10240)
    assert meant.public_repositories == ("acme/app", "acme/tools/*")
    assert meant.deployment == DeploymentLimits(Rate(1000.0), None, None, 9, 8)
    assert meant.builds == BuildLimits(7200.0, 5400.0, 300.0)
    assert meant.of_team("acme") == TeamLimits(None, 60, 500, None)
    assert meant.of_team("Größe und Söhne") == TeamLimits(None, 50, 1000, 10240)
    assert meant.of_team("another") == meant.team
    assert meant.classes["ci"] == WorkloadClass(
        name="ci",
        description="Jobs",
        isolation=Isolation.SHARED_KERNEL,
        template="tools",
        templates=("tools", "acme/base:default"),
        cpu_millis=Range(100, 4000, 1500),
        memory_mib=Range(64, 8192, 512),
        disk_mib=Range(1024, 1024 * 1024),
        pids_max=99,
        timeout_s_default=90,
        timeout_s_max=7200,
        on_lease_expiry=OnLeaseExpiry.KEEP,
        on_loss=OnLoss.REPLACE,
        attempts_max=1,
        ingress=Ingress.TOKEN,
        internet=False,
        arch="aarch64",
        regions=("no", "eu-1"),
        labels=(("disk", "ssd"), ("gpu.vendor/model", "7")),
        placement_policy=PlacementPolicy.SPREAD,
        placement_choices=3,
        reserve_s=1.0,
        image_s=2.0,
        guest_ready_s=3.0,
        start_s=7.0,
        bootstrap_s=4.0,
        release_s=5.0,
        no_capacity_s=6.0,
        create_patience_s=0.25,
        metadata_pairs_max=1,
        metadata_bytes_max=2,
        env_pairs_max=3,
        env_bytes_max=4,
    )


def test_a_part_of_a_build_has_no_more_time_than_the_whole() -> None:
    assert read("version: 1\nbuilds: {whole: 5m}\n" + CLASSES).builds == BuildLimits(300.0, 300.0, 300.0)
    assert read("version: 1\nbuilds: {whole: 5m, step: 5m, start: 1s}\n" + CLASSES).builds == BuildLimits(300.0, 300.0, 1.0)
    assert [path for _, path, _ in problems("version: 1\nbuilds: {whole: 5m, step: 6m, start: 7m}\n" + CLASSES)] == [
        "builds.step",
        "builds.start",
    ]


@pytest.mark.parametrize("limit", ["0s", "-1s", "25h", "unlimited", "60", "5 minutes"])
@pytest.mark.parametrize("name", ["whole", "step", "start"])
def test_a_build_s_limits_are_durations_of_a_day_at_most(name: str, limit: str) -> None:
    found = problems(f"version: 1\nbuilds: {{{name}: {limit}}}\n" + CLASSES)
    assert [path for _, path, _ in found] == [f"builds.{name}"]


def test_all_problems_are_said_at_once_in_the_order_of_the_lines() -> None:
    found = problems("""version: 1
limits:
  deployment: {sandboxs: 3}
classes:
  ci:
    isolation: gviser
    lifetime: {default: 2h, max: 60}
    size: {memory: {max: 512MB}}
    regions: [eu, eu]
    labels: {disk: 1}
""")
    assert [(line, path) for line, path, _ in found] == [
        (3, "limits.deployment.sandboxs"),
        (6, "classes.ci.isolation"),
        (7, "classes.ci.lifetime.max"),
        (8, "classes.ci.size.memory.max"),
        (9, "classes.ci.regions"),
        (10, "classes.ci.labels.disk"),
    ]


def test_a_word_that_is_nearly_right_gets_a_hint() -> None:
    with pytest.raises(NotADocument) as refused:
        read("version: 1\nclasses: {ci: {isolation: gviser, lifetme: {}}}")
    assert [one.hint for one in refused.value.problems] == ["did you mean 'gvisor'?", "did you mean 'lifetime'?"]


@pytest.mark.parametrize(
    "text",
    [
        "version: 1\nlimits: {deployment: {overcommit: {cpu: 4}}}\nclasses: {ci: {}}",
        "version: 1\nclasses: {ci: {size: {cpu: {max: 4, overcommit: 16}}}}",
        "version: 1\nclasses: {ci: {overcommit: 2.0}}",
        "version: 1\novercommit: {memory: 2}\nclasses: {ci: {}}",
    ],
)
def test_overcommit_is_a_host_s_to_register(text: str) -> None:
    """A document that seemed to take it would promise what no host has."""
    with pytest.raises(NotADocument) as refused:
        read(text)
    (problem,) = refused.value.problems
    assert problem.path.endswith("overcommit")
    assert (problem.message, "--overcommit-cpu" in problem.hint) == ("is not said in this document", True)


@pytest.mark.parametrize(("word", "where"), [("reserve", "--reserve-cpu"), ("capacity", "host get"), ("hosts", "enrollment-token")])
def test_what_is_said_elsewhere_is_said_where(word: str, where: str) -> None:
    with pytest.raises(NotADocument) as refused:
        read(f"version: 1\n{word}: 1\nclasses: {{ci: {{}}}}")
    assert where in refused.value.problems[0].hint


@pytest.mark.parametrize(
    ("amount", "word"),
    [
        ("memory: {max: 512}", "has no unit"),
        ("memory: {max: 512MB}", "'MB' is written 'MiB'"),
        ("memory: {max: 0.3MiB}", "whole MiB"),
        ("memory: {max: -1GiB}", "is not an amount"),
        ("memory: {max: 9999999TiB}", "whole MiB"),
        ("cpu: {max: 2 cores}", "is not CPU"),
        ("cpu: {max: 0.0001}", "whole thousandths"),
        ("cpu: {max: -1}", "thousandths"),
        ("cpu: {max: true}", "is not CPU"),
        ("cpu: {max: 99999999999999}", "thousandths"),
    ],
)
def test_a_size_in_the_wrong_unit(amount: str, word: str) -> None:
    ((line, _, message),) = problems(f"version: 1\nclasses:\n  ci:\n    size: {{{amount}}}\n")
    assert line == 4
    assert word in message


@pytest.mark.parametrize(
    ("time", "word"),
    [
        ("60", "has no unit"),
        ("60 s", "is not a time"),
        ("5M", "is not a time"),
        ("0s", "greater than 0"),
        ("1e3s", "is not a time"),
        ("99d", "86400"),
    ],
)
def test_a_time_in_the_wrong_unit(time: str, word: str) -> None:
    ((line, path, message),) = problems(f"version: 1\nclasses:\n  ci:\n    timeouts: {{release: {time}}}\n")
    assert (line, path) == (4, "classes.ci.timeouts.release")
    assert word in message


@pytest.mark.parametrize(
    ("text", "line", "path"),
    [
        ("default_class: other\n" + CLASSES, 2, "default_class"),
        ("classes:\n  ci: {size: {cpu: {min: 2, max: 500m}}}\n", 3, "classes.ci.size.cpu.max"),
        ("classes:\n  ci: {size: {cpu: {max: 0, min: 0}}}\n", 3, "classes.ci.size.cpu.max"),
        ("classes:\n  ci: {size: {memory: {max: 1GiB, default: 2GiB}}}\n", 3, "classes.ci.size.memory.default"),
        ("classes:\n  ci: {lifetime: {default: 2d}}\n", 3, "classes.ci.lifetime.default"),
        ("classes:\n  ci: {template: a, templates: [b]}\n", 3, "classes.ci.template"),
        ("classes:\n  ci: {templates: [b]}\n", 3, "classes.ci.templates"),
        ("classes:\n  ci: {placement: {choices: 3}}\n", 3, "classes.ci.placement.choices"),
        ("classes:\n  ci: {timeouts: {patience: 400s}}\n", 3, "classes.ci.timeouts.patience"),
        ("limits: {client: {burst: 3}}\n" + CLASSES, 2, "limits.client.burst"),
        ("limits: {client: {sandboxes: 2000}}\n" + CLASSES, 2, "limits.client.sandboxes"),
        ("limits: {team: {sandboxes: 20000}}\n" + CLASSES, 2, "limits.team.sandboxes"),
        ("limits: {team: {sandboxes: 20, records: 10}}\n" + CLASSES, 2, "limits.team.records"),
        ("limits: {deployment: {registered_hosts: 2, active_hosts: 3}}\n" + CLASSES, 2, "limits.deployment.active_hosts"),
        (
            "limits: {deployment: {sandboxes: 20, records: 10}, team: {sandboxes: 5, records: 8}}\n" + CLASSES,
            2,
            "limits.deployment.records",
        ),
        ("teams: {acme: {sandboxes: 5, records: 4}}\n" + CLASSES, 2, "teams.acme.records"),
        ("teams: {acme: {sandboxes: 99999}}\n" + CLASSES, 2, "teams.acme.sandboxes"),
        ("registry: {public: [app]}\n" + CLASSES, 2, "registry.public[0]"),
        ("registry: {public: [acme/app/*/more]}\n" + CLASSES, 2, "registry.public[0]"),
        ("registry: {public: [acme/../app]}\n" + CLASSES, 2, "registry.public[0]"),
        ("registry: {public: [acme/app, acme/app]}\n" + CLASSES, 2, "registry.public"),
        ("limits: {team: {registry: 5}}\n" + CLASSES, 2, "limits.team.registry"),
        ("limits: {deployment: {registry: 5GiB}}\n" + CLASSES, 2, "limits.deployment.registry"),
        (f"teams: {{{'n' * 129}: {{}}}}\n" + CLASSES, 2, f"teams.{'n' * 129}"),
    ],
)
def test_what_contradicts_itself(text: str, line: int, path: str) -> None:
    assert (line, path) in [(at, where) for at, where, _ in problems("version: 1\n" + text)]


def test_a_default_that_is_never_reached_does_no_harm() -> None:
    meant = read("version: 1\nlimits: {deployment: {sandboxes: 5, records: 50}}\n" + CLASSES)
    assert meant.deployment.sandboxes == 5
    assert meant.team.sandboxes == 1000


def test_the_longest_lifetime_bounds_the_built_in_default() -> None:
    assert read("version: 1\nclasses: {ci: {lifetime: {max: 60s}}}").classes["ci"].timeout_s_default == 60


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("# nothing but a comment\n", "empty"),
        ("a: [", "not YAML"),
        ("\ta: 1", "not YAML"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("a: \x00", "not YAML"),
        ("a: &x 1\nb: *x\n", "aliases"),
        ("a: !!python/object/apply:os.system [true]\n", "tags"),
        ("a: !x 1\n", "tags"),
        ("a: 1\na: 2\n", "twice"),
        ("? [a]\n: 1\n", "a key must be a name"),
        ("- 1\n- 2\n", "wants names"),
        ("just a sentence", "wants names"),
        ("[" * 500, "too deep"),
        ("[" * 500 + "]" * 500, "too deep"),
        ("a: [" + "1," * 30_000 + "]", "too many parts"),
        ("x" * (document.TEXT_BYTES_MAX + 1), "bytes"),
        ('version: 1\nclasses: {"a\\u202eb": {}}', "a key must be a name"),
        ('version: 1\nclasses: {ci: {description: "\\e[31m"}}', "cannot be printed"),
        ("version: 2\nclasses: {ci: {}}", "is not known"),
        ("version: 1\n", "is missing"),
        ("version: 1\nclasses: {}", "at least 1"),
        ("version: 1\nclasses: {Ci: {}}", "no name"),
        ("version: 1\nclasses: {-ci: {}}", "no name"),
        ("version: 1\nclasses: {ci: null}", "wants names"),
        ("version: 1\nclasses: {ci: {attempts: 0}}", "greater than"),
        ("version: 1\nclasses: {ci: {attempts: 1.5}}", "whole number"),
        ("version: 1\nclasses: {ci: {attempts: '3'}}", "whole number"),
        ("version: 1\nclasses: {ci: {internet: yes}}", "true or false"),
        ("version: 1\nclasses: {ci: {regions: eu}}", "list"),
        ("version: 1\nlimits: {client: {sandboxes: -1}}\nclasses: {ci: {}}", "within"),
        ("version: 1\nlimits: {client: {sandboxes: 99999999999}}\nclasses: {ci: {}}", "within"),
        ("version: 1\nlimits: {client: {request_rate: 0/s}}\nclasses: {ci: {}}", "more than nothing"),
        ("version: 1\nlimits: {client: {request_rate: 100}}\nclasses: {ci: {}}", "has no unit"),
        ("version: 1\nclasses: {" + ", ".join(f"c{n}: {{}}" for n in range(201)) + "}", "at most 200"),
    ],
)
def test_what_is_no_document(text: str, word: str) -> None:
    found = problems(text)
    assert any(word in message for _, _, message in found), found


def test_a_problem_never_shows_more_than_a_little_of_what_it_found() -> None:
    (found,) = problems("version: 1\nclasses: {ci: {isolation: " + "x" * 1000 + "}}")
    assert len(found[2]) < 100


names = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,10}[a-z0-9])?", fullmatch=True)
counts = st.none() | st.integers(0, 2**31 - 1)
rates = st.none() | st.builds(Rate, st.integers(1, 10_000).map(float), st.none() | st.integers(1, 9999).map(float))
labels = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,10}[A-Za-z0-9])?", fullmatch=True)
durations = st.integers(1, 86_400_000).map(lambda ms: ms / 1000)


def ranges(most: int) -> st.SearchStrategy[Range]:
    return (
        st.lists(st.integers(1, most), min_size=3, max_size=3)
        .map(sorted)
        .flatmap(lambda low: st.sampled_from([Range(low[0], low[2]), Range(low[0], low[2], low[1])]))
    )


classes = st.builds(
    WorkloadClass,
    description=st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF).filter(str.isprintable), max_size=30),
    isolation=st.sampled_from(Isolation),
    cpu_millis=ranges(64_000),
    memory_mib=ranges(2**20),
    disk_mib=ranges(2**20),
    timeout_s_default=st.integers(1, 3600),
    timeout_s_max=st.integers(3600, 10**7),
    attempts_max=st.integers(1, 10),
    ingress=st.sampled_from(Ingress),
    internet=st.booleans(),
    regions=st.lists(st.from_regex(r"[A-Za-z0-9]{1,8}", fullmatch=True), unique=True, max_size=3).map(tuple),
    labels=st.dictionaries(labels, labels, max_size=3).map(lambda d: tuple(sorted(d.items()))),
    placement_policy=st.sampled_from(PlacementPolicy),
    guest_ready_s=durations,
    start_s=durations,
    create_patience_s=st.sampled_from([0.25, 50.0, 300.0]),
    on_lease_expiry=st.sampled_from(OnLeaseExpiry),
    on_loss=st.sampled_from(OnLoss),
)
mib = st.none() | st.integers(0, 2**20)
deployments = st.builds(
    lambda made, client, team, teams, public, times: Deployment(
        classes={name: replace(one, name=name) for name, one in made.items()},
        default_class=next(iter(made)),
        client=client,
        team=team,
        deployment=DeploymentLimits(None, None, None, None, None),
        teams=teams,
        public_repositories=tuple(public),
        builds=BuildLimits(*sorted(times, reverse=True)),
    ),
    st.dictionaries(names, classes, min_size=1, max_size=3),
    st.builds(ClientLimits, rates),
    st.builds(TeamLimits, rates, counts, st.none(), mib),
    st.dictionaries(names, st.builds(TeamLimits, rates, counts, st.none(), mib), max_size=2),
    st.lists(st.from_regex(r"[a-z0-9]{1,4}(/[a-z0-9]{1,3})?/([a-z0-9]{1,4}|\*)", fullmatch=True), unique=True, max_size=3),
    st.lists(durations, min_size=3, max_size=3),
)


@given(deployments)
def test_the_normal_form_reads_back_as_the_same(meant: Deployment) -> None:
    assert read(normal_form.write(meant)) == meant
    assert normal_form.changes(meant, meant) == []


def test_changes_are_named_with_before_and_after() -> None:
    after = replace(Deployment(), default_class="shared-kernel", client=ClientLimits(sandboxes=3))
    found = normal_form.changes(Deployment(), after)
    assert [(one.path, one.before, one.after) for one in found] == [
        ("default_class", "default", "shared-kernel"),
        ("limits.client.sandboxes", "unlimited", "3"),
    ]
    fewer = replace(Deployment(), classes={"default": Deployment().classes["default"]})
    gone = normal_form.changes(Deployment(), fewer)
    assert all(one.path.startswith("classes.shared-kernel.") and one.after is None for one in gone)


@given(st.text(max_size=300))
def test_whatever_is_written_is_read_or_refused(text: str) -> None:
    assert outcome(text)


@given(st.text(st.sampled_from("abc:-{}[]#'\"|>&*!%@`?,\n 1.0\t"), max_size=80))
def test_whatever_looks_like_yaml_is_read_or_refused(text: str) -> None:
    assert outcome("version: 1\n" + text)


def outcome(text: str) -> object:
    """What it means, or what is wrong with it."""
    try:
        return read(text)
    except NotADocument as refused:
        return refused.problems
