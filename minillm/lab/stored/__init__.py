"""Results of long runs, as their commands wrote them, each with its machine and date.

twins.json is of `python -m minillm.lab.twins`, quant.json of `minillm bench quant`, ladder.json of `minillm ladder`,
peers.json of `minillm bench peers`, claims.json of `minillm claims --fresh`, each with `--json`.
"""

from __future__ import annotations

import json
from importlib import resources


def read_stored(name: str) -> dict:
    """name: of the file. Empty if there is no such run."""
    file = resources.files(__name__) / name
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
