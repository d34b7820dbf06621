# One node. Built from a checkout:  docker build -t tiered-kvstore .
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY kvstore kvstore
COPY rdma rdma
COPY tiers tiers
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
COPY requirements/constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt /wheels/*.whl && rm -r /wheels /tmp/constraints.txt

# Engines in other containers reach the node through the socket's volume, so the identifiers are
# fixed: run them with group 990, or change them here.
RUN groupadd --gid 990 kvstore \
    && useradd --uid 990 --gid 990 --no-create-home --home-dir /var/lib/kvstore kvstore \
    && install -d -o kvstore -g kvstore -m 0750 /var/lib/kvstore /run/kvstore
USER kvstore
VOLUME ["/var/lib/kvstore", "/run/kvstore"]
ENV KVSTORE_NODE__STATE_DIRECTORY=/var/lib/kvstore \
    KVSTORE_LISTEN__UNIX=/run/kvstore/kvstore.sock \
    KVSTORE_LOG__FORMAT=json

# SIGTERM: requests in flight end, the SSD tier is sealed, exit status 0.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["kvstore", "status", "--json"]
ENTRYPOINT ["kvstore"]
CMD ["serve"]
