"""``fp8rl exact``."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from fp8rl.cli.output import print_problems, section_table
from fp8rl.cli.recipes import load_recipe
from fp8rl.errors import OptionError
from fp8rl.plugins.adapters import ExactRequest, Section
from fp8rl.plugins.manager import PluginManager
from fp8rl.recipe import Recipe

_PROMPTS = (
    "The tides rise and fall twice a day because",
    "List five facts about prime numbers.",
    "Question: a train leaves at 9:40 and arrives at 13:05. How long does it take?\nAnswer:",
    "def quicksort(values):",
    "Once upon a time a lighthouse keeper found a letter in a bottle, and it said",
    "Hello",
    "Translate into French: the old map was wrong about the river.",
    "1 + 1 =",
)


def add_exact(app: typer.Typer, plugins: PluginManager) -> None:
    """Add the command to the command line."""

    @app.command("exact")
    def exact(
        model: Annotated[str, typer.Argument(help="Folder of a model, or a name on the hub.")],
        recipe: Annotated[
            str | None, typer.Option(help="Recipe file or JSON; else the default with exact.")
        ] = None,
        layers: Annotated[
            int, typer.Option(min=1, help="Decoder layers that run, of those there are.")
        ] = 2,
        prompts: Annotated[
            Path | None,
            typer.Option(help="Text file with a prompt in each line, of 200 tokens at most."),
        ] = None,
    ) -> None:
        """Compare the modules of rollout and trainer, bit by bit; exit 1 if one differs.

        vLLM samples with the first layers of MODEL, not compiled, and Megatron's modules get the
        inputs that vLLM's had. Then Megatron scores all that was sampled. MODEL is of Llama's or
        Qwen3's family, the trainer has Megatron's local spec; a CPU does, or a Hopper GPU.
        """
        adapters = plugins.engine_adapters()
        record = next((a.record_exact for a in adapters if a.record_exact), None)
        replay = next((a.replay_exact for a in adapters if a.replay_exact), None)
        if record is None or replay is None:
            raise OptionError(
                "exact needs vllm_fp8rl and megatron_fp8rl with their engines; install both."
            )
        # Here, because it imports torch.
        from fp8rl.first_layers import write_first_layers
        from fp8rl.models.folder import local_folder

        loaded = Recipe(exact=True) if recipe is None else load_recipe(recipe, plugins)
        with TemporaryDirectory() as folder:
            small = Path(folder, "model")
            small.mkdir()
            write_first_layers(local_folder(model), layers, small)
            texts = _PROMPTS if prompts is None else read_prompts(prompts)
            request = ExactRequest(small, loaded, texts, Path(folder, "record.pt"))
            record(request)
            found = replay(request)
        console = Console()
        title = f"exact: {str(loaded.exact).lower()}"
        shares = [
            (row.name, f"{row.equal / row.total:.4%}", str(row.total - row.equal), str(row.total))
            for row in found
        ]
        table = Section(title, ("module", "equal bits", "differ", "of"), tuple(shares))
        console.print(section_table(table))
        differ = [row.name for row in found if row.equal < row.total]
        if differ:
            print_problems(console, [f"The first that differs is '{differ[0]}'."])
        console.print(
            "Not compared: a compiled engine, TransformerEngine's layers, several ranks, later "
            "layers."
        )


def read_prompts(file: Path) -> tuple[str, ...]:
    """Return the lines of the file that ``--prompts`` names, without empty ones."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise OptionError(f"--prompts '{file}' cannot be read ({error}); give a text.") from None
    if not lines:
        raise OptionError(f"--prompts '{file}' holds no prompt; give a text with some lines.")
    return tuple(lines)
