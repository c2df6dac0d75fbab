# shellcheck shell=bash
# Sourced: builds the tests, and exports the paths of their programs, LIBRARY and STORIES.

binaries=$(
  cargo test --no-run --lib --test stories --message-format=json-render-diagnostics |
    sed -n '/"profile":{[^}]*"test":true/ s/.*"executable":"\([^"]*\)".*/\1/p'
)
# In the order of the build.
STORIES=$(grep '/stories-[^/]*$' <<<"$binaries")
LIBRARY=$(grep -vxF "$STORIES" <<<"$binaries")
export LIBRARY STORIES
