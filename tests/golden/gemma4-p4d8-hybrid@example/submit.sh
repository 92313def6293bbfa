#!/bin/bash
# Submits this bundle once, without the repository that rendered it. launch.py submit also keeps a receipt and refuses a second submission.
set -euo pipefail
bundle=/opt/pdlaunch/bundles/gemma4-p4d8-hybrid
sbatch --test-only "$bundle/job.sbatch"
exec sbatch --parsable "$bundle/job.sbatch"
