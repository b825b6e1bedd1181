"""Fixtures of server tests: one server for a whole file, plain or with parsers."""

from __future__ import annotations

import openai
import pytest
from server_harness import serving

from ds_runtime.text.parsers.registry import Parsers


@pytest.fixture(scope="module")
def served(bpe_folder):
    with serving(bpe_folder) as one:
        yield one


@pytest.fixture(scope="module")
def parsing(bpe_folder):
    with serving(bpe_folder, parsers=Parsers("deepseek-v3", "deepseekv31")) as one:
        yield one


@pytest.fixture
def client(parsing):
    """The `openai` client as it comes, of `parsing`."""
    with openai.OpenAI(base_url=parsing.url + "/v1", api_key="x", max_retries=0) as one:
        yield one
