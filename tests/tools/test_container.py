"""The Dockerfile, the Kubernetes page and the citation agree with the tree."""

from __future__ import annotations

import re

import yaml

from megatron.dpp import __version__
from tests.conftest import REPOSITORY

INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "SHELL", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_dockerfile_copies_what_exists_and_takes_another_base() -> None:
    found = instructions()
    assert {name for name, _ in found} == INSTRUCTIONS
    assert found[0][0] == "ARG" and found[0][1].startswith("BASE=") and found[1][1] == "${BASE}"
    for name, rest in found:
        if name == "COPY":
            assert all((REPOSITORY / word).exists() for word in rest.split()[:-1]), rest


def test_kubernetes_uses_the_image_of_the_dockerfile() -> None:
    text = (REPOSITORY / "examples" / "kubernetes" / "train-gpt.yaml").read_text(encoding="utf-8")
    (job,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    page = (REPOSITORY / "examples" / "kubernetes" / "README.md").read_text(encoding="utf-8")
    name = container["image"].partition(":")[0]
    assert f"docker build -t {name} " in page
    assert ("WORKDIR", container["workingDir"]) in instructions()


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0"
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf'^version = "{re.escape(__version__)}"$', project, re.MULTILINE)
