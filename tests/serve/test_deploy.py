"""The files of deploy/: valid by their schemas, and what they name exists in the command and the server."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from vitlab.serve.app import create_app
from vitlab.serve.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
DEPLOYMENT, SERVICE = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
DOCKER = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_the_manifest_is_valid_by_the_schema_of_kubernetes():
    for resource in (DEPLOYMENT, SERVICE):
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    wrong = {**SERVICE, "spec": {**SERVICE["spec"], "porst": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_the_service_finds_its_pods():
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels == SERVICE["spec"]["selector"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] in {port["name"] for port in CONTAINER["ports"]}


def test_probes_ask_routes_that_need_no_token():
    paths = {CONTAINER[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    (url,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", COMPOSE["services"]["vitlab"]["healthcheck"]["test"][-1])
    assert paths | {url} == {"/ready", "/health"} and paths <= set(create_app([]).openapi()["paths"])


def test_commands_are_those_of_vitlab_serve(command):
    options = command("serve", "--help").stdout
    dockers = yaml.safe_load(re.search(r"^CMD (.*)$", DOCKER, re.MULTILINE)[1])  # type: ignore[index]
    for words in (CONTAINER["args"], COMPOSE["services"]["vitlab"]["command"], dockers):
        assert words[:2] == ["serve", "bundled:cifar10"] and all(map(shlex.quote, words))
        for word in words:
            assert not word.startswith("--") or word in options, word
        assert words[words.index("--port") + 1] == str(CONTAINER["ports"][0]["containerPort"])


def test_a_pod_may_take_as_long_to_end_as_a_request():
    grace = int(COMPOSE["services"]["vitlab"]["stop_grace_period"].removesuffix("s"))
    sleep = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert min(grace, POD["terminationGracePeriodSeconds"] - sleep) > Settings().timeout + Settings().drain
