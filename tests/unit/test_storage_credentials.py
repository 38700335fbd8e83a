"""What is a secret in names, values and URLs: all of it is found, and nothing else."""

import re

import pytest

from spark_dl.storage.credentials import check_no_credentials, is_secret, secrets_of, without_secrets


@pytest.mark.parametrize(("url", "secrets", "shown"), [
    ("postgresql://user:pass@host/db", ["pass"], "postgresql://host/db"),
    ("postgresql://user:a/b:c@host/db", ["a/b:c"], "postgresql://host/db"),
    ("postgresql://user:@host/db", [], "postgresql://host/db"),
    ("postgresql://user@host/db", [], "postgresql://host/db"),
    ("https://abc123@host/repository", ["abc123"], "https://host/repository"),
    ("git://ghp_abc123@host/repository", ["ghp_abc123"], "git://host/repository"),
    ("jdbc:x://host/db?user=u&password=p%20q;ssl.key=none&token=", ["p%20q", "none"],
     "jdbc:x://host/db?user=u&password=***;ssl.key=***&token="),
    ("sqlite:////home/a/m.db", [], "sqlite:////home/a/m.db"),
    ("https://host/a?b=1&c", [], "https://host/a?b=1&c"),
])  # fmt: skip
def test_the_secrets_of_a_url_and_the_url_without_them(url, secrets, shown):
    assert secrets_of(url) == secrets
    assert without_secrets(url) == shown


def test_a_text_is_shown_without_the_secrets_of_a_url_as_written_and_as_meant():
    text = "cannot reach host as user with p%20q, that is p q"
    assert without_secrets("x://user:p%20q@host", text) == "cannot reach host as user with ***, that is ***"
    assert without_secrets("x://user@host", text) == text


@pytest.mark.parametrize(("name", "value", "found"), [
    ("spark.my.password", "", True), ("fs.s3a.secret.key", "", True), ("spark.my.keyword", "", False),
    ("spark.my.url", "x://u:p@host", True), ("spark.my.url", "x://host/a@b", False),
    ("spark.my.text", "of hf_abc", True), ("spark.my.text", "half_abc", False),
    ("a.pwd", "", True), ("a.pwdx", "", False),
])  # fmt: skip
def test_settings_are_secret_by_their_name_or_their_value(name, value, found):
    assert is_secret(name, value) is found


@pytest.mark.parametrize(("scheme", "host", "path", "options", "shown"), [
    ("s3", "key:secret@bucket", "/a b", "", "s3://***@bucket/a%20b"),
    ("https", "token@host", "/a", "", "https://***@host/a"),
    ("hdfs", "ghp_abc@host", "/a", "", "hdfs://***@host/a"),
    ("s3", "bucket", "/a", "secret_key=x", "s3://bucket/a?***"),
    ("s3", "user@bucket", "/a", "token=", "s3://***@bucket/a?***"), ("https", "user:pa", "/ss@host/a", "", "https://***"),
    ("s3", "key:8020", "/cret@bucket", "", "s3://***"),
])  # fmt: skip
def test_urls_of_files_with_credentials_are_refused_without_showing_them(scheme, host, path, options, shown):
    with pytest.raises(ValueError, match=rf"^the URL '{re.escape(shown)}' has credentials, which would be logged"):
        check_no_credentials(scheme, host, path, options)


@pytest.mark.parametrize(("scheme", "host", "options"), [
    ("abfss", "container@account.dfs.core.windows.net", ""), ("hdfs", "user@host", ""), ("s3", "bucket", "region=a"),
    ("hdfs", "host:8020", ""), ("https", "host", "a=b"), ("https", "host:8080", ""),
])  # fmt: skip
def test_users_and_containers_are_no_credentials(scheme, host, options):
    check_no_credentials(scheme, host, "/a:b/c@d", options)
