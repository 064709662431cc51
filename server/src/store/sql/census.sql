-- How many leases a page of names has, in the order of the names, by one read of
-- the clock. It locks nothing, and is bounded by the page.
SELECT max(p.resource) AS last_resource,
       count(*) FILTER (WHERE NOT p.released AND p.expires_at > c.t) AS live
  FROM (SELECT clock_timestamp() AS t OFFSET 0) AS c
 CROSS JOIN (SELECT l.resource, l.released, l.expires_at
               FROM fencepost.locks AS l
              WHERE l.resource > $1
              ORDER BY l.resource COLLATE "C"
              LIMIT $2) AS p
