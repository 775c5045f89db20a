#!/bin/sh
# An agent that is a shell script: one question with curl; right (exit 0) if the answer has the number, else wrong (1).
# The variables come from run.yaml or are those of every program.
set -u
facts="The $ITEM costs $PRICE, and $STOCK pieces of it are left."
body="{\"model\": \"policy\", \"messages\": [{\"role\": \"user\", \"content\": \"$facts $QUESTION\"}]}"
reply=$(curl -sSf "$OPENAI_BASE_URL/chat/completions" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" -d "$body") || exit 2
echo "$reply"
# the first content of the reply is the answer's
content=$(echo "$reply" | sed 's/.*"content": *"\([^"]*\)".*/\1/')
# -w: 51 is not in 151
echo "$content" | grep -qw -- "$ANSWER"
