# shellcheck shell=bash
# Puts megatron-dpp, and the environment that set-up finds or makes, in front of this shell's PATH:
#
#   source tools/activate.sh
#
# It sets up what is missing. For bash and zsh; in other shells write ./megatron-dpp.
_dpp_root=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)
if _dpp_python=$(bash "$_dpp_root/tools/setup.sh" --quiet); then
  PATH=$_dpp_root:$(dirname "$_dpp_python"):$PATH
  export PATH
  unset _dpp_root _dpp_python
else
  unset _dpp_root _dpp_python
  false
fi
