"""``asdsim completion``."""

from __future__ import annotations

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a shell's completion script.

    bash: eval "$(asdsim completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc; fish: asdsim completion fish >
    ~/.config/fish/completions/asdsim.fish.
    """
    from click.shell_completion import get_completion_class

    from . import cli

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(cli, {}, "asdsim", "_ASDSIM_COMPLETE").source())
