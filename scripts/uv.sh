# For `source`: what pip is told about indexes, by files and variables, uv takes in variables of its own.
told=$("${venv:-.venv/bin/python}" -m pip config list)
setting() { sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" <<<"$told" | tail -n 1 | sed 's/\\n/ /g'; }
index=$(setting index-url) indexes=$(setting extra-index-url) links=$(setting find-links)
export UV_INDEX=${UV_INDEX-$indexes} UV_FIND_LINKS=${UV_FIND_LINKS-$links}
[ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX-$index}
export UV_INDEX_STRATEGY=unsafe-best-match  # of all indexes, as pip
