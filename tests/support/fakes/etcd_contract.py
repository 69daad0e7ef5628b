"""What etcd's client makes of etcd: asked of the real one, and of the fake in this process."""

from __future__ import annotations

import pytest

from elastic_driver.etcd.client import NOT_FOUND, EtcdClient, EtcdRefusedError
from elastic_driver.etcd.messages import Created, Delete, Get, Modified, Put, end_of


class EtcdContract:
    """Tests; a subclass has a fixture ``client``."""

    def test_keys_are_read_in_pages(self, client: EtcdClient) -> None:
        client.txn([], [Put(f"/jobs/a/{number}", b"%d" % number) for number in range(5)])
        page = client.range("/jobs/a/", end_of("/jobs/a/"), limit=3)
        first = [(f"/jobs/a/{number}", b"%d" % number) for number in range(3)]
        assert [(each.key, each.value) for each in page.found] == first
        assert page.more
        rest = client.range("/jobs/a/3", end_of("/jobs/a/"), keys_only=True)
        assert [(each.key, each.value) for each in rest.found] == [("/jobs/a/3", b""), ("/jobs/a/4", b"")]
        assert not rest.more
        assert client.get("/jobs/a/5") is None

    def test_keys_are_read_as_of_a_revision(self, client: EtcdClient) -> None:
        client.txn([], [Put("/jobs/a/1", b"1")])
        revision = client.range("/jobs/a/1").revision
        client.txn([], [Put("/jobs/a/1", b"2"), Put("/jobs/a/2", b"2")])
        then = client.range("/jobs/a/", end_of("/jobs/a/"), revision=revision).found
        assert [(each.key, each.value) for each in then] == [("/jobs/a/1", b"1")]

    def test_a_transaction_is_carried_out_if_all_holds(self, client: EtcdClient) -> None:
        made = client.txn([Created("/k", 0)], [Put("/k", b"\0\xff"), Get("/k")])
        assert made.succeeded
        there = client.get("/k")
        assert there is not None
        assert made.found == ((), (there,))
        assert there.value == b"\0\xff"
        taken = client.txn([Created("/k", 0)], [Put("/k", b"2")], [Get("/k"), Get("/no")])
        assert not taken.succeeded
        assert taken.found == ((there,), ())
        both = [Created("/k", there.create_revision), Modified("/k", there.mod_revision)]
        assert client.txn(both, [Put("/k", b"3")]).succeeded
        assert not client.txn([Modified("/k", there.mod_revision)], [Delete("/k")]).succeeded
        assert not client.txn([Created("/k", -1)], [Delete("/k")]).succeeded
        changed = client.get("/k")
        assert changed is not None
        assert (changed.value, changed.create_revision) == (b"3", there.create_revision)
        assert client.txn([], [Delete("/k"), Get("/k")]).found == ((), ())
        assert client.get("/k") is None
        assert client.txn([Created("/k", 0), Modified("/k", 0)], []).succeeded

    def test_it_knows_the_cluster(self, client: EtcdClient) -> None:
        assert client.cluster_id == ""
        client.get("/k")
        cluster = client.cluster_id
        assert int(cluster) > 0
        lease, _ = client.grant(5)
        assert client.keep_alive(lease) == 5
        client.revoke(lease)
        assert client.cluster_id == cluster

    def test_a_range_of_keys_is_deleted(self, client: EtcdClient) -> None:
        client.txn([], [Put(f"/jobs/a/{number}", b"") for number in range(5)])
        client.txn([], [Delete("/jobs/a/1", "/jobs/a/4")])
        assert [each.key for each in client.range("/jobs/", end_of("/jobs/")).found] == ["/jobs/a/0", "/jobs/a/4"]

    def test_what_goes_with_a_lease_is_deleted_with_it(self, client: EtcdClient) -> None:
        lease, ttl_s = client.grant(5)
        assert ttl_s == 5
        client.txn([], [Put("/k", b"1", lease)])
        there = client.get("/k")
        assert there is not None
        assert there.lease == lease
        assert client.keep_alive(lease) == 5
        client.revoke(lease)
        assert client.get("/k") is None
        assert client.keep_alive(lease) == 0
        client.revoke(lease)
        with pytest.raises(
            EtcdRefusedError, match=r"^etcd rejected the request: etcdserver: requested lease not found$"
        ) as caught:
            client.txn([], [Put("/k", b"1", lease)])
        assert caught.value.code == NOT_FOUND
        assert client.get("/k") is None
