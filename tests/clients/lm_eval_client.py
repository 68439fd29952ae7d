"""Runs under the clients' python: lm-eval's own classes ask what a JSON file says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model


def main(asked: Path, told: Path) -> None:
    """Build the model that the job names, run one kind of request, write its answers."""
    job = json.loads(asked.read_text())
    model = get_model(job["model"])(**job["arguments"])
    kind = job["kind"]
    requests = [
        Instance(request_type=kind, doc={}, arguments=tuple(arguments), idx=index)
        for index, arguments in enumerate(job["requests"])
    ]
    if job.get("chat"):
        for request in requests:
            talk, how = request.arguments
            request.arguments = (model.apply_chat_template([{"role": "user", "content": talk}]), how)
    answers = getattr(model, kind)(requests)
    # What each answer has to be is added up here as well: `sum` of floats is not the same in every Python.
    sums = [sum(numbers) for numbers in job.get("expected", [])]
    told.write_text(json.dumps({"answers": answers, "sums": sums}))


main(Path(sys.argv[1]), Path(sys.argv[2]))
