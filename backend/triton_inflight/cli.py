"""The command line: ``triton-inflight``. Each command hands over to the room that does the work."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from triton_inflight import bench, commands, compare_command, scaffold, top
from triton_inflight.errors import InflightError

if TYPE_CHECKING:
    from triton_inflight.launcher import TritonServer

_DEFAULT_REPOSITORY = Path("model_repository")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="In-flight (continuous) batching for Hugging Face causal LMs on a stock Triton Inference Server.",
    epilog="Start here: triton-inflight init models --name NAME --model REF, then triton-inflight serve "
    "--model-repository models",
)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; an error that was raised on purpose is shown without a traceback."""
    # SIGTERM and a closed terminal end a command as Ctrl-C does, with its servers and temporary files.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    try:
        app()
    except InflightError as error:
        _errors.print(f"[red]error[/]  {escape(str(error))}")
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"triton-inflight {importlib.metadata.version('triton-inflight')}")
        raise typer.Exit


@app.callback()
def _global_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    model_repository: Annotated[
        list[Path] | None,
        typer.Option(help=f"Model repository; repeatable. Default: ./{_DEFAULT_REPOSITORY}."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Load this model; repeatable. Default: every model there is.")
    ] = None,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one, as below.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535)] = 8002,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anyone who reaches it can use it; 0.0.0.0: everyone.")
    ] = "127.0.0.1",
    log_file: Annotated[
        Path | None,
        typer.Option(help="Where server and models log to. Default: a temporary file, kept after a failure."),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Start the server anew when it ends by itself or the process of a model dies. Default: exit with "
            "the reason.",
        ),
    ] = False,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Further options of tritonserver.")
    ] = None,
) -> None:
    """Serve a model repository on a real tritonserver, until Ctrl-C.

    The tritonserver is the one that TRITON_INFLIGHT_SERVER names, else the one on PATH, else the one of the
    nvidia-pytriton wheel ([cyan]pip install 'triton-inflight\\[server]'[/]).

    Examples:

    [cyan]triton-inflight serve --model smollm2[/]  of ./model_repository, on ports 8000, 8001 and 8002

    [cyan]triton-inflight serve --model-repository models --model smollm2 --http-port 9000[/]

    [cyan]triton-inflight serve -- --log-verbose=1 --rate-limit=off[/]
    """
    from triton_inflight.launcher import TritonServer

    options = options or []
    if options and not options[0].startswith("-"):
        raise typer.BadParameter(f"unexpected '{options[0]}'; name a repository with --model-repository")
    if not model_repository and not _DEFAULT_REPOSITORY.is_dir():
        raise typer.BadParameter(
            f"there is no ./{_DEFAULT_REPOSITORY}; name a repository with --model-repository, or make one with "
            f"`triton-inflight init {_DEFAULT_REPOSITORY} --name NAME --model REF`"
        )
    server = TritonServer(
        model_repository or [_DEFAULT_REPOSITORY],
        models=model or [],
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        host=host,
        options=options,
        log_path=log_file,
    )
    _serve(server, restart)


def _serve(server: TritonServer, restart: bool) -> None:
    try:
        while True:
            server.start()
            server.wait_ready(timeout=None, progress=True)
            _announce(server)
            error = server.watch()
            if not restart:
                raise error
            _errors.print(f"[yellow]restarting[/]  {escape(str(error))}")
            server.keep_ports()
            server.stop()
    except KeyboardInterrupt:
        _errors.print("stopping; Ctrl-C again does not wait for requests in flight")
    finally:
        server.stop()


def _announce(server: TritonServer) -> None:
    models = server.ready_models()
    body = json.dumps({"text_input": "The sky is", "max_tokens": 32, "stream": True})
    url = f"{server.http_url}/v2/models/{models[0] if models else 'MODEL'}/generate_stream"
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[green]ready[/]    {escape(', '.join(models)) or 'no model is loaded'}")
    console.print(f"HTTP     {server.http_url}")
    console.print(f"gRPC     {server.grpc_url}")
    console.print(f"metrics  {server.metrics_url}")
    console.print(f"log      {escape(str(server.log_path))}")
    console.print(f"try      [cyan]curl {url} -d {escape(shlex.quote(body))}[/]")
    console.print("Ctrl-C stops it.")


@app.command()
def install(
    backend_directory: Annotated[
        Path,
        typer.Option(help="Triton's backend directory; in NVIDIA's container /opt/tritonserver/backends."),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace another backend named inflight.")] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Take it out instead.")] = False,
) -> None:
    """Place the backend into an existing Triton, so that plain tritonserver serves its models.

    The Python stub of that Triton must be for the Python that runs this command.

    Examples:

    [cyan]triton-inflight install --backend-directory /opt/tritonserver/backends[/]

    [cyan]tritonserver --model-repository models[/]  serves models of backend "inflight" from then on

    [cyan]triton-inflight install --backend-directory /opt/tritonserver/backends --uninstall[/]
    """
    from triton_inflight import installer

    console = Console(highlight=False, soft_wrap=True)
    if uninstall:
        console.print(f"[green]removed[/]    {escape(str(installer.uninstall(backend_directory)))}")
        return
    console.print(f"[green]installed[/]  {escape(str(installer.install(backend_directory, force)))}")
    console.print(
        f"[dim]Start tritonserver with {escape(str(Path(sys.executable).parent))} first in PATH: its stub takes "
        "Python packages from the environment of the first python3 there.[/]"
    )


# Commands that stand in the rooms that do their work.
app.command()(commands.generate)
app.command()(commands.demo)
app.command()(bench.bench)
app.command()(compare_command.compare)
app.command()(top.top)
app.command()(scaffold.init)
app.command()(scaffold.check)
