"""The page of a run, which follows it while it trains."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from .pages import answer_errors, render, static_route
from .run_state import RunState


class RunSite:
    """A run as a page.

    Args:
      run: its folder; it is only read.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._state = run, RunState(run)

    def app(self) -> Starlette:
        """The application, for ``Guard``."""
        routes = [
            Route("/", self._page),
            Route("/state", self._state_json),
            Route("/grid/{step:position}", self._grid),
            static_route(),
        ]
        return answer_errors(Starlette(routes=routes))

    def _page(self, request: Request) -> Response:
        return HTMLResponse(render("run.html", root=request.scope["root_path"], title=str(self._run)))

    def _state_json(self, request: Request) -> Response:
        state = self._state.read()
        if request.query_params.get("version") == state["version"]:
            state = {"version": state["version"], "facts": state["facts"]}
        return JSONResponse(state)

    def _grid(self, request: Request) -> Response:
        path = self._state.grids().get(request.path_params["step"])
        if path is None:
            raise HTTPException(404, f"There is no grid of step {request.path_params['step']}.")
        return Response(path.read_bytes(), media_type="image/png", headers={"cache-control": "private, max-age=3600"})
