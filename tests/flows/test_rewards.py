"""`grpo rewards`: what a habit still names is answered."""

from typer.testing import CliRunner

from flows.command_line.main import application


def test_a_command_that_is_gone_says_where_weights_come_from() -> None:
    result = CliRunner().invoke(application, ["rewards", "fetch", "lpips", "--to", "weights", "--yes"])
    assert result.exit_code == 2
    assert "hf://owner/repo/file" in result.stderr
    assert "fetch" not in CliRunner().invoke(application, ["rewards", "--help"]).stdout
