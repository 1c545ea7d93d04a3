"""One function decides what may be shown: cases as data, and that what is no secret stays readable."""

import pytest

from dagster_ckpt.values.redaction import (
    cause_to_show,
    names_a_secret,
    shown_command,
    shown_settings,
    user_info,
    without_secrets,
)

S = "S3CR3T"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"postgresql+psycopg://u:{S}@h:1/db", "postgresql+psycopg://***@h:1/db"),
        (f"postgresql://u:ab@{S}@h/db", "postgresql://***@h/db"),
        (f"postgresql://u:ab/{S}@h/db", "postgresql://***@h/db"),
        (f"postgresql://u:a?{S}@h/db", "postgresql://***@h/db"),
        (f"postgresql://u:a#{S}@h/db", "postgresql://***@h/db"),
        (f"postgresql://h/db?user=u&password={S}", "postgresql://h/db?user=u&password=***"),
        (f"postgresql://h/db?sslpassword={S}&x=1", "postgresql://h/db?sslpassword=***&x=1"),
        (f"host=h user=u password={S} dbname=d", "host=h user=u password=*** dbname=d"),
        (f"spark.executorEnv.DB_PASS={S}", "spark.executorEnv.DB_PASS=***"),
        (f"spark-submit --db-pass {S} orders.py", "spark-submit --db-pass *** orders.py"),
        (f"host=h password='{S} x' dbname=d", "host=h password='***' dbname=d"),
        (f"cannot connect to jdbc:postgresql://u:{S}@h/db", "cannot connect to jdbc:postgresql://***@h/db"),
        (f"jdbc:mysql://h/db?user=u&password={S}: refused", "jdbc:mysql://h/db?user=u&password=*** refused"),
        (f"https://{S}@github.com/a/b", "https://***@github.com/a/b"),
        (f"https://h/x?sig={S}&se=1", "https://h/x?sig=***&se=1"),
        (f"https://h/x?X-Amz-Signature={S}", "https://h/x?X-Amz-Signature=***"),
        (f"{{'secret': '{S}', 'key': 'k'}}", "{'secret': '***', 'key': 'k'}"),
        (f'{{"client_secret": "{S}"}}', '{"client_secret": "***"}'),
        (f"spark.hadoop.fs.s3a.secret.key={S}", "spark.hadoop.fs.s3a.secret.key=***"),
        (f"fs.azure.account.key.x.dfs.core.windows.net={S}", "fs.azure.account.key.x.dfs.core.windows.net=***"),
        (f"AWS_SECRET_ACCESS_KEY={S}", "AWS_SECRET_ACCESS_KEY=***"),
        (f"run --password {S} --token '{S} x' orders.py", "run --password *** --token '***' orders.py"),
        (f"Authorization: Bearer {S}abc.def", "Authorization: *** ***"),
        ("key AKIAIOSFODNN7EXAMPLE was refused", "key *** was refused"),
        (f"-----BEGIN RSA PRIVATE KEY-----\n{S}\n-----END RSA PRIVATE KEY----- x", "*** x"),
        (f'{{"password": "ab\\"{S}", "user": "u"}}', '{"password": "***", "user": "u"}'),
        (f"{{'password': 'ab\\'{S}, {S}; x', 'user': 'u'}}", "{'password': '***', 'user': 'u'}"),
        (rf"{{\"password\": \"ab\\\"{S}\", \"user\": \"u\"}}", r"{\"password\": \"***\", \"user\": \"u\"}"),
        (f"CREATE CONNECTION PASSWORD='ab''{S}' USER='u'", "CREATE CONNECTION PASSWORD='***' USER='u'"),
        ("password='' user='u' db=''", "password='***' user='u' db=''"),
        (f'password="""{S}""" user=u', 'password="***" user=u'),
        (f'options: password="ab {S} and the rest is cut o', 'options: password="***"'),
        (rf"password='C:\' and token='{S}'", "password='***' and token='***'"),
        (
            f"jdbc:sqlserver://h;user=sa;password={{a;'{S}}};encrypt=true",
            "jdbc:sqlserver://h;user=sa;password=***;encrypt=true",
        ),
        (f"passwords: ['{S}', '{S}'], user: u", "passwords: ***, user: u"),
        (f'{{"secrets": {{"a": {{"b": "}}{S}"}}, "c": ["{S}"]}}, "user": "u"}}', '{"secrets": ***, "user": "u"}'),
        (f"connect(user=u, password=a'b)c\"{S}) failed", "connect(user=u, password=***) failed"),
        (f"LoginModule required username='u' password='{S}';", "LoginModule required username='u' password='***';"),
    ],
)
def test_a_secret_is_hidden_and_the_rest_is_left(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(shown).count("S3CR3T") == 0


@pytest.mark.parametrize(
    "text",
    [
        "abfss://container@account.dfs.core.windows.net/snapshots",
        "hdfs://namenode:8020/snapshots/a@b",
        "s3://bucket/a@b/chk-1",
        "file:///data/streams",
        "the keys of the state differ from those that the new code groups or joins by",
        "operator 2 (aggregation), key 2: site string -> device string",
        "its lease passed to another execution (token 3)",
        "http://[::1]:4566/bucket",
        "write to admin@example.org",
        "partition_key: site, passed=3, bypass=no, compass: north",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_secrets_that_are_known_are_hidden_wherever_they_stand() -> None:
    assert without_secrets('could not translate host name "S3CR3T@h"', [S, None, ""]) == (
        'could not translate host name "***@h"'
    )


def test_a_command_is_shown_word_by_word() -> None:
    words = ["spark-submit", "--conf", f"spark.kafka.sasl.jaas.config=x password='{S}'", "--token", S, "-v", "a.py"]
    assert shown_command(words) == [
        *("spark-submit", "--conf", "spark.kafka.sasl.jaas.config=***", "--token", "***", "-v", "a.py"),
    ]
    assert S not in str(shown_command(["x", f"--db=postgresql://u:{S}@h/d", f"--api-key={S}"]))


def test_settings_are_shown_by_their_names() -> None:
    settings = {"redis.password": S, "secret": S, "key": S, "redis.url": f"redis://u:{S}@h", "redis.port": 1}
    assert shown_settings(settings) == {
        **{"redis.password": "***", "secret": "***", "key": "***"},
        **{"redis.url": "redis://***@h", "redis.port": 1},
    }


@pytest.mark.parametrize(
    ("url", "apart"),
    [
        (f"sftp://u:{S}@h:22/x", ("sftp://h:22/x", f"u:{S}")),
        (f"sftp://u:a@{S}@h/x", ("sftp://h/x", f"u:a@{S}")),
        ("sftp://u@h/x", ("sftp://h/x", "u")),
        ("abfss://c@a.net/x", ("abfss://c@a.net/x", "")),
        ("s3://b/a@b", ("s3://b/a@b", "")),
        ("/a/b@c", ("/a/b@c", "")),
    ],
)
def test_a_url_and_its_user_info(url: str, apart: tuple[str, str]) -> None:
    assert user_info(url) == apart


def test_a_cause_that_says_a_secret_is_not_chained() -> None:
    clean = ValueError("no such table")
    leaking = ValueError(f"postgresql://u:{S}@h")
    wrapped = RuntimeError("failed")
    wrapped.__cause__ = leaking
    assert cause_to_show(clean) is clean
    assert cause_to_show(leaking) is None
    assert cause_to_show(wrapped) is None


@pytest.mark.parametrize("name", ["DB_PASS", "FERNET_KEY", "ENCRYPTION_KEY", "smtp.pass", "key", "SECRET_HANDSHAKE"])
def test_settings_with_such_names_are_hidden(name: str) -> None:
    assert names_a_secret(name)


@pytest.mark.parametrize("name", ["KEYSPACE", "key.deserializer", "PASSES", "MONKEY", "COMPASS"])
def test_other_settings_are_shown(name: str) -> None:
    assert not names_a_secret(name)
