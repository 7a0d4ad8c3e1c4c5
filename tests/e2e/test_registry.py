"""The registry at the product's one address: teams' keys, tokens, uploads, skopeo."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import jwt
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from e2b import Sandbox, Template

from tests.e2e import oci
from tests.e2e.conftest import Product
from tests.e2e.oci import Image

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def token(product: Product, *scopes: str, key: str | None = None) -> str:
    shown = base64.b64encode(f"anybody:{key or product.key}".encode()).decode()
    asked: list[tuple[str, str | int | float | bool | None]] = [("service", "atoll-registry"), *(("scope", scope) for scope in scopes)]
    answer = product.http.get(product.url + "/registry/token", params=asked, headers={"Authorization": f"Basic {shown}"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["token"])


def ask(product: Product, method: str, path: str, bearer: str, **options: Any) -> Any:
    headers = {"Authorization": f"Bearer {bearer}", "Accept": MANIFEST, **options.pop("headers", {})}
    return product.http.request(method, product.url + path, headers=headers, **options)


def push_blob(product: Product, repository: str, bearer: str, content: bytes) -> str:
    begun = ask(product, "POST", f"/v2/{repository}/blobs/uploads/", bearer)
    assert begun.status_code == 202, begun.text
    where = begun.headers["location"]
    sign = "&" if "?" in where else "?"
    done = ask(product, "PUT", f"{where}{sign}digest={digest(content)}", bearer, content=content)
    assert done.status_code == 201, done.text
    return digest(content)


def push(product: Product, repository: str, tag: str) -> str:
    bearer = token(product, f"repository:{repository}:pull,push")
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": []}}).encode()
    layer = uuid4().bytes * 100
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": push_blob(product, repository, bearer, config), "size": len(config)},
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar",
                    "digest": push_blob(product, repository, bearer, layer),
                    "size": len(layer),
                }
            ],
        }
    ).encode()
    done = ask(product, "PUT", f"/v2/{repository}/manifests/{tag}", bearer, content=manifest, headers={"Content-Type": MANIFEST})
    assert done.status_code == 201, done.text
    return digest(manifest)


def push_layout(product: Product, repository: str, tag: str, layout: Path) -> str:
    """The image of an OCI layout; answers how it is referred to."""
    bearer = token(product, f"repository:{repository}:pull,push")

    def blob(name: str) -> bytes:
        return (layout / "blobs" / "sha256" / name.removeprefix("sha256:")).read_bytes()

    manifest = blob(json.loads((layout / "index.json").read_text())["manifests"][0]["digest"])
    said = json.loads(manifest)
    for one in (said["config"], *said["layers"]):
        push_blob(product, repository, bearer, blob(one["digest"]))
    kind = {"Content-Type": said.get("mediaType", MANIFEST)}
    done = ask(product, "PUT", f"/v2/{repository}/manifests/{tag}", bearer, content=manifest, headers=kind)
    assert done.status_code == 201, done.text
    return f"{product.url.removeprefix('http://')}/{repository}:{tag}"


def imported(product: Product, source: str, key: str, *, name: str = "") -> dict[str, Any]:
    """How an import by a team's key ended; its template stays where it is named."""
    kept, name = bool(name), name or f"r-{uuid4().hex[:12]}"
    made = product.call("POST", "/v1/template-imports", json={"name": name, "source": f"registry:{source}"}, key=key)
    assert made.status_code == 202, made.text
    until = time.monotonic() + 60
    while time.monotonic() < until:
        one: dict[str, Any] = product.call("GET", f"/v1/template-imports/{made.json()['id']}", key=key).json()
        if one["state"] != "running":
            if not kept:
                product.call("DELETE", f"/v1/templates/{name}", key=key)
            return one
        time.sleep(0.1)
    raise AssertionError(one)


@pytest.mark.skipif(oci.BUSYBOX is None, reason="busybox is missing: apt-get install busybox-static")
def test_a_pushed_image_is_a_source_for_its_team_alone(product: Product, tmp_path: Path) -> None:
    image = Image([oci.busybox(oci.Entry("etc/from-image", b"yes\n"))], {"Env": ["PATH=/bin"]})
    pushed = push_layout(product, f"default/{uuid4().hex[:8]}", "one", image.write(tmp_path / "image"))
    ended = imported(product, pushed, product.key)
    assert ended["state"] == "ready", ended
    other = product.call("POST", "/v1/keys", json={"name": "other", "team": f"o-{uuid4().hex[:8]}"}).json()["secret"]
    assert imported(product, pushed, other)["code"] == "IMAGE_ACCESS_DENIED"
    name = f"r-{uuid4().hex[:12]}"
    Template.build(Template().from_image(pushed).run_cmd("cat /etc/from-image >/home/user/seen"), name, cpu_count=1, memory_mb=512)
    with Sandbox.create(template=name, timeout=60) as sandbox:
        assert sandbox.commands.run("cat /home/user/seen").stdout == "yes\n"
    product.call("DELETE", f"/v1/templates/{name}")


@contextlib.contextmanager
def decided(product: Product, **parts: Any) -> Iterator[None]:
    """While this is open the deployment's document says this, too."""
    shown = product.call("GET", "/v1/config").json()
    document = yaml.safe_load(shown["document"])
    for name, value in parts.items():
        document[name] = {**document.get(name, {}), **value}
    changed = product.call("PUT", "/v1/config", json={"document": yaml.safe_dump(document), "revision": shown["revision"]})
    assert changed.status_code in (200, 201), changed.text
    try:
        yield
    finally:
        revision = product.call("GET", "/v1/config").json()["revision"]
        product.call("PUT", "/v1/config", json={"document": shown["document"], "revision": revision})


def test_a_public_repository_is_pulled_without_credentials(product: Product) -> None:
    repository = f"default/{uuid4().hex[:8]}"
    pushed = push(product, repository, "one")
    address = f"{product.url}/v2/{repository}/manifests/one"
    refused = product.http.get(address, headers={"Accept": MANIFEST})
    assert refused.status_code == 401
    scope = refused.headers["www-authenticate"].partition('scope="')[2].partition('"')[0]
    asked = {"service": "atoll-registry", "scope": scope}
    assert product.http.get(product.url + "/registry/token", params=asked).status_code == 401
    with decided(product, registry={"public": [repository]}):
        bearer = product.http.get(product.url + "/registry/token", params=asked).json()["token"]
        assert ask(product, "GET", f"/v2/{repository}/manifests/one", bearer).headers["docker-content-digest"] == pushed
        assert ask(product, "POST", f"/v2/{repository}/blobs/uploads/", bearer).status_code == 401
        assert ask(product, "DELETE", f"/v2/{repository}/manifests/{pushed}", bearer).status_code == 401


def test_a_team_that_keeps_as_much_as_it_may_is_told_so(product: Product) -> None:
    team = f"s-{uuid4().hex[:8]}"
    key = product.call("POST", "/v1/keys", json={"name": "small", "team": team}).json()["secret"]
    with decided(product, teams={team: {"registry": "1MiB"}}):
        bearer = token(product, f"repository:{team}/app:pull,push", key=key)
        push_blob(product, f"{team}/app", bearer, os.urandom(700_000))
        begun = ask(product, "POST", f"/v2/{team}/app/blobs/uploads/", bearer)
        content = os.urandom(700_000)
        refused = ask(product, "PUT", f"{begun.headers['location']}&digest={digest(content)}", bearer, content=content)
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (403, "TEAM_STORAGE_LIMIT")
        # As `docker push` sends: of a length that it does not say.
        parts = (content[at : at + 50_000] for at in range(0, len(content), 50_000))
        refused = ask(product, "PATCH", begun.headers["location"], bearer, content=parts)
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (403, "TEAM_STORAGE_LIMIT")


def test_nobody_gets_in_without_a_key(product: Product) -> None:
    refused = product.http.get(product.url + "/v2/")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith(f'Bearer realm="{product.url}/registry/token",service="atoll-registry"')
    assert product.http.get(product.url + "/registry/token").status_code == 401
    wrong = product.http.get(product.url + "/registry/token", auth=("anybody", "e2b_" + "0" * 40))
    assert (wrong.status_code, wrong.json()["errors"][0]["code"]) == (401, "UNAUTHORIZED")
    # E2B's second version lives beside it.
    assert product.call("GET", "/v2/sandboxes").status_code == 200


def test_what_is_pushed_is_pulled_and_deleted(product: Product) -> None:
    repository = f"default/{uuid4().hex[:8]}"
    pushed = push(product, repository, "one")
    bearer = token(product, f"repository:{repository}:pull,delete")
    assert ask(product, "GET", f"/v2/{repository}/manifests/one", bearer).headers["docker-content-digest"] == pushed
    assert ask(product, "GET", f"/v2/{repository}/tags/list", bearer).json()["tags"] == ["one"]
    assert ask(product, "DELETE", f"/v2/{repository}/manifests/{pushed}", bearer).status_code == 202
    assert ask(product, "GET", f"/v2/{repository}/manifests/one", bearer).status_code == 404


def test_teams_do_not_reach_each_other(product: Product) -> None:
    for scope in ("repository:somebody/app:pull", "repository:default/../somebody/app:pull"):
        bearer = token(product, scope)
        assert ask(product, "GET", "/v2/somebody/app/tags/list", bearer).status_code == 401
        assert ask(product, "POST", "/v2/somebody/app/blobs/uploads/", bearer).status_code == 401
    # One that may pull may not push.
    bearer = token(product, "repository:default/app:pull")
    assert ask(product, "POST", "/v2/default/app/blobs/uploads/", bearer).status_code == 401


def test_tokens_that_are_forged_late_or_for_another(product: Product) -> None:
    good = token(product, "repository:default/app:pull")
    head = jwt.get_unverified_header(good)
    said = jwt.decode(good, options={"verify_signature": False})
    other = Ed25519PrivateKey.generate()
    now = int(time.time())
    assert ask(product, "GET", "/v2/", good).status_code == 200
    for change in ({}, {"exp": now - 3600, "nbf": now - 7200}, {"aud": "another"}, {"iss": "another"}):
        forged = jwt.encode({**said, **change}, other, algorithm="EdDSA", headers={"kid": head["kid"]})
        assert ask(product, "GET", "/v2/", forged).status_code == 401
    parts = good.split(".")
    unsigned = ".".join((base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode(), parts[1], ""))
    assert ask(product, "GET", "/v2/", unsigned).status_code == 401


def test_skopeo_copies_there_and_back(product: Product, tmp_path: Path) -> None:
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        pytest.skip("skopeo is not installed: apt-get install skopeo")
    repository = f"default/{uuid4().hex[:8]}"
    pushed = push(product, repository, "one")
    login = tmp_path / "auth.json"
    address = product.url.removeprefix("http://")
    login.write_text(json.dumps({"auths": {address: {"auth": base64.b64encode(f"_:{product.key}".encode()).decode()}}}))

    def run(*words: str) -> str:
        ran = subprocess.run([skopeo, *words], capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    there, folder = f"docker://{address}/{repository}", f"dir:{tmp_path / 'image'}"
    plain = ["--authfile", str(login)]
    run("copy", *plain, "--src-tls-verify=false", f"{there}:one", folder)
    run("copy", *plain, "--dest-tls-verify=false", folder, f"{there}:two")
    inspected = json.loads(run("inspect", *plain, "--tls-verify=false", f"{there}:two"))
    assert inspected["Digest"] == pushed
    assert sorted(inspected["RepoTags"]) == ["one", "two"]
