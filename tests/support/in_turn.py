"""Commands one after the other in one fresh process: exit code, stderr, and which heavy libraries were loaded."""

from __future__ import annotations

IN_TURN = """
import contextlib, io, json, sys
from leandit.tools.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["leandit", *words]
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            loaded = [name for name in ("torch", "diffusers", "transformers") if name in sys.modules]
            print(json.dumps([end.code, err.getvalue(), loaded]))
"""
