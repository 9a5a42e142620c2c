"""``opteq play``: start the server and say where the page is."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from opteq.common.errors import UserError, needs_extra

if TYPE_CHECKING:
    from rich.console import Console


def command(run: Path, port: int, browser: bool, console: Console) -> None:
    """Serve the page of ``run`` on localhost until Ctrl-C."""
    with needs_extra("play"):
        import uvicorn

    from opteq.play.app import make_app, open_session

    app = make_app(open_session(run))
    listening = bound_socket(port)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    console.print(f"open {address} in a browser; Ctrl-C ends it", markup=False, highlight=False, soft_wrap=True)
    if browser:
        import webbrowser

        webbrowser.open(address)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    server.run(sockets=[listening])


def bound_socket(port: int) -> socket.socket:
    """A socket on localhost alone; 0 takes a free port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(f"port {port} can't be used ({error.strerror}); give another with --port, or 0") from error
    return listener
