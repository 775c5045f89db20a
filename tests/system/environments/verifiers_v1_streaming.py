"""A harness of a user's own for verifiers 0.4, which asks for streams and calls no tools."""

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["StreamingHarness"]


class StreamingHarness(vf.Harness[vf.HarnessConfig]):
    """One answer, read as a stream; it answers with what it has read, letter by letter, a second time."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask twice."""
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                stream = await client.chat.completions.create(
                    model=ctx.model, messages=messages, stream=True, max_tokens=50, stop=["!"]
                )
                pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
                messages += [{"role": "assistant", "content": "".join(pieces)}, {"role": "user", "content": "Again."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
