"""``vllm bench serve``: ``python -m tests.bench.contest.vllm_bench FLAGS``.

vLLM's own command asks for the version of a package ``vllm``, and the build for CPU has another name (FAQ.md).
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description=__doc__)
    add_cli_args(parser)
    main(parser.parse_args())
