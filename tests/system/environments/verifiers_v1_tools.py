"""Server of the tools of verifiers_v1_worlds.py; it runs as a process of its own."""

import verifiers.v1 as vf


class AddToolset(vf.Toolset[vf.ToolsetConfig]):
    """One tool."""

    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


if __name__ == "__main__":
    AddToolset.run()
