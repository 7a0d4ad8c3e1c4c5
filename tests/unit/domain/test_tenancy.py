import hashlib

from atoll.domain.tenancy import key_digest


def test_a_key_is_kept_as_its_sha256() -> None:
    assert key_digest("e2b_1") == hashlib.sha256(b"e2b_1").hexdigest()
    assert "e2b_1" not in key_digest("e2b_1")
